// The runs of a transfer from a block: their number, the reason, and their places.
"use strict";

const WHOLE = "the whole block";

function valueOf(point, kind) {
  if (kind === "layer") return point.region.layers[point.at.L];
  if (kind === "head") return headOf(point, view.tpRank);
  const tokens = tokensOf(point);
  return tokens && tokens[0];
}

// Returns the first byte of a field in the shown page or cell, else in the block.
function firstPoint() {
  if (["page", "cell"].includes(view.level) && drawn.rows.length) {
    const point = find(plan(), view.stage, view.group, drawn.rows[0].start, drawn.rows[0]);
    if (point && point.kind === "field") return point;
  }
  let first = Infinity;
  for (const region of regionsOf(plan(), view)) {
    for (const { padding, box } of plan().pages[region.page].fields) {
      if (!padding) first = Math.min(first, addressOf(box, { B: view.block }));
    }
  }
  return find(plan(), view.stage, view.group, first);
}

// Returns the first and the last head, in the whole model, that this rank holds of the group.
function headsHere() {
  let first = Infinity, last = -1;
  for (const region of regionsOf(plan(), view)) {
    const parts = region.parts.length ? new Set(region.parts) : [0];
    for (const field of plan().pages[region.page].fields) {
      if (!axisOf(field.box, "H")) continue;
      for (const part of parts) {
        const held = field.shard === "H" ? field.ranges[view.tpRank * region.splits + part] : [[0, 0, axisOf(field.box, "H")[1]]];
        for (const [, start, length] of held) { first = Math.min(first, start); last = Math.max(last, start + length - 1); }
      }
    }
  }
  return last < 0 ? null : [first, last];
}

// -- highlighting -----------------------------------------------------------------------------

// Highlights the layer, head, heads or token of a point; nothing if it has none.
function followKind(kind, point) {
  const value = point && kind === "heads" ? firstHalf() : point && valueOf(point, kind);
  paint.follow = value === null || value === undefined ? null : { kind, value, point };
  update();
}

function firstHalf() {
  const heads = headsHere();
  return heads && heads[1] > heads[0] ? [heads[0], Math.floor((heads[0] + heads[1] - 1) / 2)] : null;
}

function chosenBy({ kind, value }) {
  return { layer: { layer: value }, token: { token: value }, head: { heads: [value, value] }, heads: { heads: value } }[kind];
}

function runsOf(chosen) {
  return runsIn(plan(), view.group, chosen);
}

// Counts the runs of a selection in a group of a plan with the same ranks as the shown one.
function runsIn(mine, group, chosen) {
  const key = JSON.stringify([view.stage, group, view.tpRank, chosen]);
  return remembered(mine, key, () => countRuns(mine, view.stage, group, view.tpRank, chosen));
}

function sizesOf(found) {
  if (!found || !found.many) return "–";
  const [least, most] = [size(found.least), size(found.most)], unit = most.split(" ")[1];
  return least === most ? most : `${least.replace(` ${unit}`, "")} – ${most}`;
}

// -- the table --------------------------------------------------------------------------------

// Returns the parts of a block that can be transferred: name, kind and selection of each.
function choices() {
  const made = [{ name: WHOLE, chosen: {} }];
  // A highlighted part keeps its point. A search specifies a head or token without a point.
  const point = (paint.follow && paint.follow.point) || firstPoint();
  const add = (kind, name, value) => {
    if (value === null) return;
    const followed = paint.follow && paint.follow.kind === kind ? paint.follow : { kind, value };
    made.push({ kind, name: name(followed.value), chosen: chosenBy(followed) });
  };
  if (!point) return made;
  const half = firstHalf();
  if (half) {
    add("heads", ([first, last]) => `half its heads, ${first === last ? first : `${first}–${last}`}`, half);
    add("head", (head) => `one head, ${head}`, valueOf(point, "head") ?? half[0]);
  }
  add("layer", (layer) => `one layer, ${shortName(data.names[layer]).replace("layer ", "")}`, valueOf(point, "layer"));
  add("token", (token) => `one token, ${token}`, valueOf(point, "token"));
  return made;
}

function showTransfer() {
  const table = byId("transfer"), held = table.contains(document.activeElement) && document.activeElement.dataset.kind;
  table.replaceChildren();
  const head = make("tr");
  for (const name of ["", "runs", "size of each"]) head.append(make("th", name, { scope: "col" }));
  table.append(head);
  let told = null;
  for (const choice of choices()) {
    const found = runsOf(choice.chosen), row = make("tr", null, { "data-chosen": JSON.stringify(choice.chosen) });
    const pressed = Boolean(paint.follow && paint.follow.kind === choice.kind);
    const name = make("th", null, { scope: "row" });
    const button = make("button", choice.name, { type: "button", "aria-pressed": String(pressed), "data-kind": choice.kind || "" });
    if (choice.kind) row.className = "choice";
    if (choice.kind) row.addEventListener("click", () => {
      const point = (paint.follow && paint.follow.point) || (cursor && cursor.point && cursor.point.kind === "field" ? cursor.point : firstPoint());
      followKind(pressed ? null : choice.kind, point);
    });
    name.append(choice.kind ? button : choice.name);
    row.append(name, make("td", found ? count(found.many) : "very many"), make("td", sizesOf(found)));
    if (found && found.many === 1) row.classList.add("best");
    if (pressed) row.classList.add("followed");
    table.append(row);
    if (pressed || (!told && choice.kind)) told = { ...choice, found };
  }
  if (held) for (const button of table.querySelectorAll(`[data-kind="${held}"]`)) button.focus({ preventScroll: true });
  say("followed", told ? why(told) : "");
  say("transfer-note", paint.follow
    ? "Its runs are underlined in the picture. Choose it again to undo."
    : `A run is contiguous memory that moves in one piece. Choose a line to highlight its runs${byHand(", or Shift+click the picture", "")}.`);
}

// Explains the number of runs: axes outside of the selected one divide it.
function why({ name, kind, chosen, found }) {
  const number = !found ? "very many runs" : found.many === 1 ? "one run" : `${count(found.many)} runs`;
  const letter = { heads: "H", head: "H", layer: "L", token: "N" }[kind];
  const axes = nestingHere(), own = axes.findLastIndex(([axis]) => axis === letter);
  if (own < 0 || !found) return `${titled(name)}: ${number}.`;
  const outside = axes.slice(0, own).filter(([axis]) => axis !== "B" && axis !== letter);
  const product = outside.reduce((all, [, many]) => all * many, 1);
  const sum = product === found.many && outside.length > 1 ? `${outside.map(([, many]) => count(many)).join(" × ")} = ` : "";
  const because = causes(outside, product, letter, found).map((cause, n) => `${n ? ", and" : " because"} ${cause}`).join("");
  return `${titled(name)}: ${sum}${number}${because}. ${elsewhere(chosen)}`;
}

// Rewrites "half its heads, 0–3" and "one head, 2" for the start of a sentence.
function titled(name) {
  return name.replace(/^half its heads, (\d+)$/, "Head $1").replace("half its heads,", "Heads")
    .replace(/^one (.)(\w+),/, (_, first, rest) => first.toUpperCase() + rest);
}

const ONE = { L: "layer", H: "head", N: "token", k: "part of a block" };

function causes(outside, product, letter, { many }) {
  const letters = [...new Set(outside.map(([axis]) => axis))], { order } = plan().knobs;
  const names = letters.map((axis) => AXES[axis]).join(" and ");
  const every = letters.map((axis) => `every ${ONE[axis]}`).reverse().join(" of ");
  const pieces = product > many ? "" : `: ${every} has a separate piece`;
  const made = [];
  if (outside.length) made.push(`in ${order} ${names} are outside of ${AXES[letter]}${pieces}`);
  else if (many === 1) made.push(`in ${order} no axis of a block is outside of ${AXES[letter]}, so it is contiguous`);
  if (product < many) made.push(`each page is divided${isPadded() ? " by padding" : ""}`);
  return made;
}

// Returns whether most pages have padding between their fields.
const isPadded = () => plan().pages[mainField().region.page].fields.some((field) => field.padding);

// Counts the runs of the same selection in the other orders of the page.
function elsewhere(chosen) {
  const told = [], { knobs } = plan();
  for (const order of new Set(data.plans.map((one) => one.knobs.order))) {
    const other = order === knobs.order ? null : inOrder(order), group = other ? sameGroup(other) : -1;
    const found = group < 0 ? null : runsIn(other, group, chosen);
    if (!found || !found.many) continue;
    const apart = LABELLED.filter((name) => other.knobs[name] !== knobs[name]).map((name) => `${name} ${count(other.knobs[name])}`);
    told.push(`${order}\u00a0${count(found.many)}${apart.length ? ` (${apart.join(", ")})` : ""}`);
  }
  return told.length ? `Runs in other orders: ${told.join(", ")}.` : "";
}

const LABELLED = ["block", "pack"]; // values that may differ between orders; differences are shown

// Returns the plan of an order with the same ranks and dtypes as the shown one, or undefined.
function inOrder(order) {
  const now = plan().knobs, unlike = (one) => LABELLED.filter((name) => one.knobs[name] !== now[name]).length;
  const alike = Object.keys(now).filter((name) => name !== "order" && !LABELLED.includes(name));
  const found = data.plans.filter((one) => one.knobs.order === order && alike.every((name) => one.knobs[name] === now[name]));
  return found.sort((one, two) => unlike(one) - unlike(two))[0];
}

// Returns the index of another plan's group that is equivalent to the shown one, with equally split states; -1 if none is.
function sameGroup(other) {
  const looks = (mine, number) => {
    const { kind, window, num_layers } = mine.groups[number];
    return JSON.stringify([kind, window, num_layers, ...regionsOf(mine, { stage: view.stage, group: number }).map((one) => one.splits).slice(0, 1)]);
  };
  const wanted = looks(plan(), view.group), alike = [...other.groups.keys()].filter((number) => looks(other, number) === wanted);
  return alike.includes(view.group) ? view.group : alike[0] ?? -1;
}
