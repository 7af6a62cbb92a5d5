// Knobs, which choose among the plans of the page, and the search box.
"use strict";

// -- knobs ----------------------------------------------------------------------------------------

function knob(name, values, current, choose) {
  const few = values.length <= 6 && values.every(([, text]) => String(text).length <= 12);
  const box = make(few ? "div" : "label", null, { class: "knob" }), find = (text) => values.find(([value]) => String(value) === text)[0];
  box.append(make("span", name));
  if (few) {
    const choices = make("span", null, { class: "choices", role: "group", "aria-label": name });
    choices.append(...values.map(([value, text]) => make("button", text, { type: "button", value })));
    choices.addEventListener("click", (event) => { if (event.target.value) choose(find(event.target.value)); });
    box.append(choices);
  } else {
    const select = make("select", null, { "aria-label": name });
    select.append(...values.map(([value, text]) => make("option", text, { value })));
    select.addEventListener("change", () => choose(find(select.value)));
    box.append(select);
  }
  turn(box, current);
  return box;
}

// Shows which value a knob has.
function turn(box, current) {
  for (const button of box.querySelectorAll("button")) button.setAttribute("aria-pressed", String(button.value === String(current)));
  for (const select of box.querySelectorAll("select")) select.value = String(current);
}

// The knobs of a box, [name, values, current value, what to do]; they are made anew only where they are others,
// so that the keyboard stays where it is.
function showIn(box, knobs) {
  const looks = JSON.stringify(knobs.map(([name, values]) => [name, values]));
  if (box.dataset.looks !== looks) box.replaceChildren(...knobs.map((one) => knob(...one)));
  else knobs.forEach(([, , current], n) => turn(box.children[n], current));
  box.dataset.looks = looks;
}

// The plan that has this value, and otherwise most in common with the one that is shown.
function closest(name, value) {
  const now = plan().knobs;
  let best = -1, most = -1;
  data.plans.forEach((one, number) => {
    if (one.knobs[name] !== value) return;
    const same = Object.keys(now).filter((key) => key !== name && one.knobs[key] === now[key]).length;
    if (same > most) { most = same; best = number; }
  });
  return best;
}

function showKnobs() {
  const now = plan().knobs, knobs = [];
  for (const name of Object.keys(now)) {
    const values = [...new Set(data.plans.map((one) => one.knobs[name]))];
    if (values.length < 2) continue;
    if (typeof values[0] === "number") values.sort((one, two) => one - two);
    else values.sort();
    knobs.push([name, values.map((value) => [value, value]), now[name], (value) => change({ plan: closest(name, value) })]);
  }
  if (plan().ranks > 1) {
    const rank = view.stage * plan().tp + view.tpRank;
    knobs.push(["rank", [...Array(plan().ranks).keys()].map((n) => [n, n]), rank,
      (n) => change({ stage: Math.floor(n / plan().tp), tpRank: n % plan().tp })]);
  }
  showIn(byId("knobs"), knobs);
  byId("colours").hidden = view.level === "memory";
  showIn(byId("colours"), [["colour by", MODES.map((mode) => [mode, mode]), paint.mode, (mode) => { paint.chosen = mode; update(); }]]);
}

// -- search ---------------------------------------------------------------------------------------

function search(text) {
  const query = text.trim().toLowerCase();
  const [, kind, digits] = /^(head|token|block|layer|address)?\s*(0x[0-9a-f]+|[\d,]+)$/.exec(query) || [];
  const number = digits === undefined ? NaN : Number(digits.replaceAll(",", ""));
  if (kind === "head" || kind === "token") { paint.follow = { kind, value: number }; go({ level: "block" }); return true; }
  if (kind === "block" && number < poolOf(plan(), view).blocks) { go({ level: "block", block: number }); return true; }
  if (digits !== undefined && (kind === "address" || !kind)) return goToAddress(number);
  const wanted = kind === "layer" ? `.${number}.` : query;
  const name = query ? data.names.findIndex((one) => `.${one.toLowerCase()}.`.includes(wanted)) : -1;
  const mine = plan();
  for (const region of name < 0 ? [] : mine.regions) {
    const index = region.layers.indexOf(name);
    if (index < 0) continue;
    paint.follow = { kind: "layer", value: name };
    go({ level: "block", stage: region.stage, group: region.group });
    return true;
  }
  return false;
}

function goToAddress(address) {
  const point = find(plan(), view.stage, view.group, address);
  if (!point || point.at.B === undefined) return false;
  if (point.kind === "field") go({ level: "cell", block: point.at.B, region: point.region, index: point.at.L, at: point.at, field: point.field });
  else go({ level: "block", block: point.at.B });
  const row = rowAt(drawn.rows, address);
  if (row >= 0) setCursor({ row, x: (address - drawn.rows[row].start + 0.5) / drawn.rows[row].nbytes });
  else showFacts(point);
  return true;
}
