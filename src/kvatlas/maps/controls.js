// Controls that choose among the plans of the page.
"use strict";

function knob(name, values, current, choose) {
  const few = values.length <= 8 && values.map(([, text]) => text).join("").length <= 72;
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
  turn(box, values, current);
  return box;
}

// Marks the current value of a control, and greys out values with the reason.
function turn(box, values, current) {
  for (const button of box.querySelectorAll("button")) button.setAttribute("aria-pressed", String(button.value === String(current)));
  for (const select of box.querySelectorAll("select")) select.value = String(current);
  box.querySelectorAll("button, option").forEach((choice, n) => {
    const [, , reason] = values[n];
    choice.classList.toggle("apart", Boolean(reason));
    choice.title = reason || "";
  });
}

// Shows controls in a box: [name, values, current value, callback], with values as [value, text, reason for grey]. Controls
// are replaced only if they differ, so that the keyboard focus stays.
function showIn(box, knobs) {
  const looks = JSON.stringify(knobs.map(([name, values]) => [name, values.map(([value, text]) => [value, text])]));
  if (box.dataset.looks !== looks) box.replaceChildren(...knobs.map((one) => knob(...one)));
  else knobs.forEach(([, values, current], n) => turn(box.children[n], values, current));
  box.dataset.looks = looks;
}

// Returns the plan with this value that has the most in common with the shown one.
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

let knobsNote = ""; // other values that changed with the last choice

// Chooses a value. Not every combination has a plan, so a note lists other values that had to change.
function turnTo(name, value) {
  const told = changedBy(name, value);
  change({ plan: closest(name, value) });
  knobsNote = told;
  showKnobs();
}

// Describes which other values change with a value, because there is no plan of that combination; "" if none do.
function changedBy(name, value) {
  const now = plan().knobs, next = data.plans[closest(name, value)].knobs;
  const others = Object.keys(now).filter((key) => key !== name && now[key] !== next[key]);
  const list = (knobs) => others.map((key) => `${key} ${knobs[key]}`).join(", ");
  return others.length ? `The page has no plan of ${name} ${value} with ${list(now)}; showing ${list(next)}.` : "";
}

// Returns the controls for the plans: [name, values, current value, callback].
function planKnobs() {
  const now = plan().knobs, knobs = [];
  for (const name of Object.keys(now)) {
    const values = [...new Set(data.plans.map((one) => one.knobs[name]))];
    if (values.length < 2) continue;
    if (typeof values[0] === "number") values.sort((one, two) => one - two);
    else values.sort();
    knobs.push([name, values.map((value) => [value, value, changedBy(name, value)]), now[name], (value) => turnTo(name, value)]);
  }
  return knobs;
}

function showKnobs() {
  const knobs = [...remembered(showKnobs, view.plan, planKnobs)];
  const grey = knobs.some(([, values]) => values.some(([, , reason]) => reason));
  if (plan().ranks > 1) {
    const rank = view.stage * plan().tp + view.tpRank;
    knobs.push(["rank", [...Array(plan().ranks).keys()].map((n) => [n, n]), rank,
      (n) => change({ stage: Math.floor(n / plan().tp), tpRank: n % plan().tp })]);
  }
  showIn(byId("knobs"), knobs);
  say("knobs-note", knobsNote || (grey ? "Grey: the page has no plan of this value with the others; choosing it changes them." : ""));
  byId("colours").hidden = view.level === "memory";
  showIn(byId("colours"), [["colour by", modesHere().map((mode) => [mode, mode]), paint.mode, (mode) => { paint.chosen = mode; update(); }]]);
}
