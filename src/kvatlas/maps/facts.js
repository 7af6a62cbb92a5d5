// What is said beside the picture: of a byte, of what is followed, of transfers and of groups.
"use strict";

// -- what a point is --------------------------------------------------------------------------

function pointAt(x, y) {
  const { rows, place } = drawn;
  if (!place) return null;
  const row = rows[Math.floor((y - place.top) / place.height)];
  if (!row || x < place.left) return null;
  const pixels = Math.max(1, Math.round(row.nbytes * place.scale));
  if (x - place.left >= pixels) return null;
  const share = (Math.floor(x - place.left) + 0.5) / pixels;
  const address = row.start + Math.min(row.nbytes - 1, Math.floor(share * row.nbytes));
  return find(plan(), view.stage, view.group, address) || { kind: "unused", at: {}, address, region: null };
}

// Name and value of everything there is to say of a point.
function factsOf(point) {
  const mine = plan(), facts = [];
  const add = (name, value) => { if (value !== null && value !== undefined) facts.push([name, String(value)]); };
  if (point.kind === "unused") {
    add("unused", `by ${words(mine.groups[view.group].kind)}: ${point.nbytes ? count(point.nbytes) + " bytes of the block" : "here"}`);
    add("block", count(point.at.B ?? view.block));
    add("address", count(point.address));
    return facts;
  }
  const { region, at } = point;
  add("layer", data.names[region.layers[at.L]] + partName(region, at.L));
  if (point.kind === "padding") {
    add("padding", point.nbytes ? `${count(point.nbytes)} bytes behind the page` : `field ${point.field.name}`);
    add("block", count(at.B));
    add("address", count(point.address));
    return facts;
  }
  const { field } = point;
  add("field", `${field.name}, ${field.dtype}`);
  const head = headOf(point, view.tpRank);
  if (head !== null) add("head", `${head}${field.shard === "H" ? ` of ${field.whole}` : ""}`);
  else if (field.shard) add("row", `${globalRow(region, field, at, view.tpRank)} of ${field.whole}`);
  const ranks = ranksOf(mine, region, field, at, view.tpRank);
  add("tp rank", view.tpRank + (ranks.length > 1 ? `, the same bytes on ${ranks.length} ranks` : ""));
  add("block", count(at.B));
  const tokens = tokensOf(point);
  if (tokens) add("token", (tokens[0] === tokens[1] ? tokens[0] : `${tokens[0]}–${tokens[1]}`) + " of the block");
  else if (!region.tokens_per_state) add("token", "the request's state after its last token");
  const inner = field.box[2].filter(([axis]) => !["B", "L", "k", "H", "N"].includes(axis));
  add("element", inner.map(([axis]) => `${axis} ${at[axis]}`).join(", ") || null);
  const start = point.address - at.rest;
  add("bytes", `${count(start)} – ${count(start + field.box[1] - 1)}`);
  add("address", count(point.address));
  add("stride", field.box[2].filter(([, n]) => n > 1).map(([axis, , stride]) => `${axis} ${count(stride)}`).join(" · "));
  return facts;
}

function showFacts(point) {
  const list = byId("facts");
  list.replaceChildren();
  for (const [name, value] of factsOf(point)) {
    list.append(make("dt", name), make("dd", value, { "data-fact": name }));
  }
  byId("facts-title").textContent = { field: "This byte", padding: "Padding", unused: "Unused" }[point.kind];
}

function showTip(point, x, y) {
  const tip = byId("tip"), facts = new Map(factsOf(point));
  const name = facts.get("layer") ? shortName(facts.get("layer")) : "";
  const field = point.kind === "field" ? point.field.name : point.kind;
  const parts = [name, field, facts.has("head") ? `head ${facts.get("head").split(" ")[0]}` : "",
    point.kind === "field" && tokensOf(point) ? `token ${facts.get("token").split(" ")[0]}` : "", `byte ${facts.get("address")}`];
  tip.textContent = parts.filter(Boolean).join(" · ");
  tip.hidden = false;
  const wide = byId("stage").clientWidth;
  tip.style.left = `${Math.max(0, Math.min(x + 14, wide - tip.offsetWidth - 4))}px`;
  tip.style.top = `${y + 18}px`;
}

// -- following --------------------------------------------------------------------------------

function followChoices() {
  const box = byId("follow");
  box.replaceChildren();
  const point = cursor && cursor.point && cursor.point.kind === "field" ? cursor.point : null;
  for (const kind of ["token", "head", "layer"]) {
    const pressed = paint.follow && paint.follow.kind === kind;
    const button = make("button", kind, { "aria-pressed": String(Boolean(pressed)) });
    button.addEventListener("click", () => followKind(pressed ? null : kind, point));
    box.append(button);
  }
}

function valueOf(point, kind) {
  if (kind === "layer") return point.region.layers[point.at.L];
  if (kind === "head") return headOf(point, view.tpRank);
  const tokens = tokensOf(point);
  return tokens && tokens[0];
}

function firstPoint() {
  const { rows } = rowsOf(plan(), { ...view, level: "block" });
  for (const row of rows) {
    const point = find(plan(), view.stage, view.group, row.start);
    if (point && point.kind === "field") return point;
  }
  return null;
}

function followKind(kind, point) {
  const at = point || firstPoint();
  const value = kind && at ? valueOf(at, kind) : null;
  paint.follow = value === null ? null : { kind, value };
  if (kind && value === null) byId("followed").textContent = `There is no ${kind} here.`;
  update();
}

function chosenBy(follow) {
  if (follow.kind === "layer") return { layer: follow.value };
  return follow.kind === "head" ? { heads: [follow.value, follow.value] } : { token: follow.value };
}

function piecesOf(chosen) {
  return pieces(plan(), view.stage, view.group, view.block, view.tpRank, chosen);
}

function sizesOf(runs) {
  if (!runs) return "more than can be counted here";
  if (!runs.length) return "nothing";
  let least = Infinity, most = 0;
  for (const [, length] of runs) { least = Math.min(least, length); most = Math.max(most, length); }
  return least === most ? `${size(least)}${runs.length > 1 ? " each" : ""}` : `${size(least)} to ${size(most)}`;
}

function showFollowed() {
  followChoices();
  const text = byId("followed");
  if (!paint.follow) {
    text.textContent = "Choose what to follow, or Shift+click: its pieces light up.";
    return;
  }
  const runs = piecesOf(chosenBy(paint.follow));
  const { kind, value } = paint.follow;
  const name = kind === "layer" ? shortName(data.names[value]) : `${kind} ${value}`;
  text.textContent = `${name}: ${runs ? count(runs.length) : "very many"} ${runs && runs.length === 1 ? "piece" : "pieces"}, ${sizesOf(runs)}.`;
}

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

function showTransfer() {
  const table = byId("transfer");
  const point = firstPoint();
  const rows = [["the whole block", {}]];
  const heads = headsHere();
  if (heads && heads[1] > heads[0]) {
    const half = Math.floor((heads[0] + heads[1] - 1) / 2);
    rows.push([half > heads[0] ? `half its heads, ${heads[0]}–${half}` : `half its heads, ${heads[0]}`, { heads: [heads[0], half] }]);
    if (half > heads[0]) rows.push([`one head, ${heads[0]}`, { heads: [heads[0], heads[0]] }]);
  }
  if (point) rows.push([`one layer, ${shortName(data.names[valueOf(point, "layer")]).replace("layer ", "")}`, { layer: valueOf(point, "layer") }]);
  if (point && tokensOf(point)) rows.push(["one token, 0", { token: 0 }]);
  table.replaceChildren();
  const head = make("tr");
  for (const name of ["", "pieces", "size"]) head.append(make("th", name));
  table.append(head);
  for (const [name, chosen] of rows) {
    const runs = piecesOf(chosen), row = make("tr", null, { "data-chosen": JSON.stringify(chosen) });
    row.append(make("th", name, { scope: "row" }), make("td", runs ? count(runs.length) : "–"), make("td", sizesOf(runs)));
    if (runs && runs.length === 1) row.className = "best";
    table.append(row);
  }
}

// -- groups that overlay each other ---------------------------------------------------------------

function alikeGroups() {
  const mine = plan(), alike = new Map();
  mine.groups.forEach((group, number) => {
    const regions = mine.regions.filter((one) => one.stage === view.stage && one.group === number);
    if (!regions.length) return;
    const key = JSON.stringify([group.kind, regions.map((one) => [one.page, one.layers.length])]);
    if (!alike.has(key)) alike.set(key, { group, regions, numbers: [] });
    alike.get(key).numbers.push(number);
  });
  return [...alike.values()];
}

function showGroups() {
  const box = byId("groups"), mine = plan();
  box.replaceChildren();
  const kinds = alikeGroups(), shared = mine.groups.length > 1;
  byId("sharing-note").textContent = shared
    ? "A block id belongs to one group at a time, and the groups of a pool lie over the same bytes. Choose one to see the block as it holds it."
    : "All layers share one block table.";
  for (const { group, regions, numbers } of kinds) {
    const pool = mine.pools.find((one) => one.stage === view.stage && one.index === group.pool);
    let padding = 0;
    for (const region of regions) {
      const page = mine.pages[region.page], pages = region.layers.length + region.left_out;
      if (page.padding) padding += page.padding[1] * pages;
      for (const field of page.fields) {
        if (field.padding) padding += field.box[2].filter(([a]) => a !== "B" && a !== "L").reduce((n, [, s]) => n * s, field.box[1]) * pages;
      }
    }
    const unused = (mine.unused[`${view.stage}/${numbers[0]}`] || []).reduce((sum, one) => sum + one[1], 0);
    const current = numbers.includes(view.group);
    const card = make("button", null, { class: "group", "aria-pressed": String(current) });
    const times = numbers.length > 1 ? `${numbers.length} × ` : "";
    const layers = regions.reduce((sum, one) => sum + one.layers.length, 0);
    card.append(make("b", `${times}${words(group.kind)}`));
    const seen = group.window ? `, window ${count(group.window)}` : "";
    const parts = regions.some((one) => one.splits > 1) ? "parts of states" : layers === 1 ? "page" : "pages";
    card.append(make("small", `${layers} ${parts}, ${count(group.block_size)} tokens${seen}`));
    const bar = make("span", null, { class: "bar" });
    for (const [kind, bytes] of [["used", pool.block_bytes - padding - unused], ["padding", padding], ["unused", unused]]) {
      const part = make("i", null, { class: kind });
      part.style.flexGrow = bytes;
      if (bytes) bar.append(part);
    }
    card.append(bar);
    const waste = [padding ? `${count(padding)} bytes padding` : "", unused ? `${count(unused)} bytes unused` : ""].filter(Boolean);
    card.append(make("small", waste.join(", ") || "no padding"));
    card.addEventListener("click", () => change({ group: current && numbers.length > 1 ? numbers[(numbers.indexOf(view.group) + 1) % numbers.length] : numbers[0] }));
    box.append(card);
  }
}
