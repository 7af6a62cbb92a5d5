// Knobs, which choose among the plans of the page, and the search box.
"use strict";

// -- knobs ----------------------------------------------------------------------------------------

function knob(name, values, current, choose) {
  const label = make("label", null, { class: "knob" });
  label.append(make("span", name));
  const few = values.length <= 6 && values.every(([, text]) => String(text).length <= 12);
  if (few) {
    const choices = make("span", null, { class: "choices", role: "group", "aria-label": name });
    for (const [value, text] of values) {
      const button = make("button", text, { type: "button", "aria-pressed": String(value === current) });
      button.addEventListener("click", () => choose(value));
      choices.append(button);
    }
    const group = make("div", null, { class: "knob" });
    group.append(make("span", name), choices);
    return group;
  }
  const select = make("select", null, { "aria-label": name });
  for (const [value, text] of values) {
    const option = make("option", text, { value });
    option.selected = value === current;
    select.append(option);
  }
  select.addEventListener("change", () => choose(values.find(([value]) => String(value) === select.value)[0]));
  label.append(select);
  return label;
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
  const box = byId("knobs"), now = plan().knobs;
  box.replaceChildren();
  for (const name of Object.keys(now)) {
    const values = [...new Set(data.plans.map((one) => one.knobs[name]))];
    if (values.length < 2) continue;
    if (typeof values[0] === "number") values.sort((one, two) => one - two);
    else values.sort();
    box.append(knob(name, values.map((value) => [value, value]), now[name], (value) => change({ plan: closest(name, value) })));
  }
  if (plan().ranks > 1) {
    const rank = view.stage * plan().tp + view.tpRank;
    box.append(knob("rank", [...Array(plan().ranks).keys()].map((n) => [n, n]), rank,
      (n) => change({ stage: Math.floor(n / plan().tp), tpRank: n % plan().tp })));
  }
  byId("colours").hidden = view.level === "memory";
  byId("colours").replaceChildren(knob("colour by", MODES.map((mode) => [mode, mode]), paint.mode, (mode) => { paint.chosen = mode; update(); }));
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
  if (row >= 0) setCursor({ row, x: (address - drawn.rows[row].start + 0.5) / drawn.rows[row].nbytes }, true);
  else showFacts(point);
  return true;
}
