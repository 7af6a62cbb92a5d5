// The search box: parse a query, and go to the place it names.
"use strict";

// Parses "layer 3, head 5, token 100" to numbers by kind; null if the query is something else.
function termsOf(query) {
  const term = /(layer|head|token|block|rank)s?\s*(\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:[\s,;]+|$)/y, terms = {};
  while (term.lastIndex < query.length) {
    const found = term.exec(query);
    if (!found || found[1] in terms) return null;
    terms[found[1]] = Number(found[2].replaceAll(",", ""));
  }
  return query ? terms : null;
}

// Goes to the place of a query. Returns whether it was found, and a message.
function search(text) {
  const query = text.trim().toLowerCase(), terms = termsOf(query);
  const [, digits] = /^(?:address\s*)?(0x[0-9a-f]+|[\d,]+)$/.exec(query) || [];
  if (!query) { paint.follow = null; update(); return { found: true, told: "" }; }
  if (terms) return goToTerms(terms);
  if (digits !== undefined) return goToAddress(Number(digits.replaceAll(",", "")));
  if (query === "padding") return goToPadding();
  const name = data.names.findIndex((one) => `.${one.toLowerCase()}.`.includes(query));
  const region = name < 0 ? null : plan().regions.find((one) => one.layers.includes(name));
  if (!region) return missing(`nothing is called “${text.trim()}”: search for a layer's name, “head 5”, “token 100”, “block 7”, “padding” or an address`);
  return goToTerms({}, { name, region });
}

const missing = (told) => ({ found: false, told });
const numbers = (things, last) => `${things} 0 to ${count(last)}`;

// Returns the first layer with a number, and its region.
function layerOf(number) {
  const name = data.names.findIndex((one) => `.${one}.`.includes(`.${number}.`));
  const region = plan().regions.find((one) => one.layers.includes(name));
  return region ? { name, region } : null;
}

function lastLayer() {
  const found = data.names.map((name) => Number(name.split(".").find((part) => /^\d+$/.test(part)))).filter(Number.isInteger);
  return Math.max(0, ...found);
}

const axesOf = (head, token) => [...(head === undefined ? [] : ["H"]), ...(token === undefined ? [] : ["N"])];

// Returns a field with the given axes, in a layer's region or in all regions of a group.
function fieldWith(axes, own) {
  for (const region of own.region ? [own.region] : regionsOf(plan(), own)) {
    if (axes.includes("N") && !region.tokens_per_state) continue;
    const field = plan().pages[region.page].fields.find((one) => !one.padding && axes.every((axis) => axisOf(one.box, axis)));
    if (field) return { region, field };
  }
  return null;
}

// Completes the place of a query. Returns a message if there is no such place, else null.
function settle(terms, own, notes) {
  const mine = plan(), { head, token, block, rank } = terms;
  if (rank !== undefined) {
    if (rank >= mine.ranks) return `no rank ${rank}: ${numbers("ranks", mine.ranks - 1)}`;
    if (own.region && own.region.stage !== Math.floor(rank / mine.tp)) return `rank ${rank} does not have this layer: it belongs to another stage`;
    Object.assign(own, { stage: Math.floor(rank / mine.tp), tpRank: rank % mine.tp });
  }
  const axes = axesOf(head, token);
  const groups = own.region ? [own.region.group] : [own.group, ...mine.groups.keys()];
  const group = groups.find((one) => (axes.length ? fieldWith(axes, { ...own, group: one }) : regionsOf(mine, { ...own, group: one }).length));
  if (group === undefined) return `no ${axes.map((axis) => ONE[axis]).join(" and ")} here: these layers do not have any`;
  own.group = group;
  return (head === undefined ? null : settleHead(head, terms, own, notes)) || settleBlock(token, block, own, notes);
}

// Sets the rank that holds a head of the whole model.
function settleHead(head, { rank }, own, notes) {
  const mine = plan(), { region, field } = fieldWith(["H"], own);
  const whole = field.shard === "H" ? field.whole : axisOf(field.box, "H")[1];
  if (head >= whole) return `no head ${head}: ${numbers("heads", whole - 1)}`;
  if (field.shard !== "H") return null;
  const holds = (tpRank) => field.ranges.slice(tpRank * region.splits, (tpRank + 1) * region.splits).flat()
    .some(([, start, length]) => head >= start && head < start + length);
  if (holds(own.tpRank)) return null;
  const tpRank = [...Array(mine.tp).keys()].find(holds), name = own.stage * mine.tp + tpRank;
  if (rank !== undefined) return `head ${head} is not on rank ${rank}, but on rank ${name}`;
  own.tpRank = tpRank;
  notes.push(`head ${head} is on rank ${name}`);
  return null;
}

// Sets the block of a token. If no block is named, the request fills blocks 0, 1, 2, ... in order.
function settleBlock(token, block, own, notes) {
  const pool = poolOf(plan(), own), each = plan().groups[own.group].block_size;
  if (block !== undefined && block >= pool.blocks) return `no block ${count(block)}: ${numbers("blocks", pool.blocks - 1)}`;
  if (block !== undefined && token >= each) return `no token ${count(token)} in a block: ${numbers("tokens", each - 1)}`;
  own.block = block ?? (token === undefined ? Math.min(own.block, pool.blocks - 1) : Math.floor(token / each));
  if (own.block >= pool.blocks) return `no token ${count(token)}: all blocks together hold ${numbers("tokens", pool.blocks * each - 1)}`;
  if (token === undefined) return null;
  own.token = token % each;
  if (block === undefined) notes.push(`token ${count(token)} is token ${own.token} of block ${count(own.block)}, if a request fills blocks in order from 0 on`);
  return null;
}

// Goes to a layer, head and token: to a cell, a page or a block, depending on how much is known.
function goToTerms(terms, named) {
  const layer = terms.layer === undefined ? named : layerOf(terms.layer), notes = [];
  if (terms.layer !== undefined && !layer) return missing(`no layer ${terms.layer}: ${numbers("layers", lastLayer())}`);
  const own = { stage: view.stage, tpRank: view.tpRank, group: view.group, block: view.block };
  if (layer) Object.assign(own, { region: layer.region, stage: layer.region.stage });
  const problem = settle(terms, own, notes);
  if (problem) return missing(problem);
  paint.follow = followed(terms, layer, own);
  const { stage, tpRank, group, block } = own, { head } = terms;
  go({ level: "block", stage, tpRank, group, block });
  const address = head === undefined && own.token === undefined ? null : placeOfTerms(head, own, layer);
  if (layer && address !== null) {
    const point = find(plan(), stage, group, address, { region: layer.region });
    const level = head !== undefined && own.token !== undefined ? "cell" : "page";
    if (level === "cell") paint.follow = null; // the view shows nothing else
    go({ level, region: point.region, index: point.at.L, at: point.at, field: point.field });
  }
  if (address !== null) pointTo(address);
  return { found: true, told: notes.join("; ") };
}

// Returns what to highlight: the finest part of the query.
function followed({ head }, found, { token }) {
  if (token !== undefined) return { kind: "token", value: token };
  if (head !== undefined) return { kind: "head", value: head };
  return found ? { kind: "layer", value: found.name } : null;
}

// Returns the first byte of a head, a token or both, in the given layer or else in the first one.
function placeOfTerms(head, own, layer) {
  const { region, field } = fieldWith(axesOf(head, own.token), own);
  const chosen = { layer: layer ? layer.name : region.layers[0], token: own.token, heads: head === undefined ? null : [head, head] };
  for (const index of layersApart(region, chosen)) {
    const [box] = narrowed(region, field, index, own.tpRank, chosen);
    if (box) return box[0] + own.block * axisOf(field.box, "B")[2];
  }
  return null;
}

// Clears the messages of the last search and the last choice.
function forgetNotes() {
  say("found", "");
  knobsNote = "";
}

// Puts the cursor on a byte. Shows its details even if its row is not part of the sample.
function pointTo(address) {
  const row = rowAt(drawn.rows, address), point = find(plan(), view.stage, view.group, address);
  if (row >= 0) setCursor({ row, x: (address - drawn.rows[row].start + 0.5) / drawn.rows[row].nbytes, point });
  else { cursor = { row: 0, x: 0, point }; showFacts(point); }
}

function goToAddress(address) {
  const point = find(plan(), view.stage, view.group, address), pool = poolOf(plan(), view);
  if (!point || point.at.B === undefined) return missing(`no byte ${count(address)} in pool ${pool.index}: ${numbers("bytes", pool.bytes - 1)}`);
  if (point.kind === "field") go({ level: "cell", block: point.at.B, region: point.region, index: point.at.L, at: point.at, field: point.field });
  else go({ level: "block", block: point.at.B });
  pointTo(address);
  return { found: true, told: "" };
}

// Returns the first padding or unused byte of a block that belongs to a group.
function paddingOf(group) {
  const mine = plan(), own = { ...view, group }, found = [];
  for (const { page } of regionsOf(mine, own)) {
    const { fields, padding } = mine.pages[page];
    found.push(...fields.filter((field) => field.padding).map((field) => field.box), ...(padding ? [padding] : []));
  }
  found.push(...(mine.unused[`${view.stage}/${group}`] || []));
  const block = Math.min(view.block, poolOf(mine, own).blocks - 1);
  return found.length ? { block, address: Math.min(...found.map((box) => addressOf(box, { B: block }))) } : null;
}

function goToPadding() {
  const groups = [view.group, ...plan().groups.keys()].filter((group) => regionsOf(plan(), { ...view, group }).length);
  const group = groups.find(paddingOf);
  if (group === undefined) return missing("no padding: every byte of a block is used");
  const { block, address } = paddingOf(group), name = words(plan().groups[group].kind);
  paint.follow = null;
  go({ level: "block", group, block });
  pointTo(address);
  const what = cursor.point.kind === "unused" ? "unused byte" : "padding";
  return { found: true, told: `the first ${what} of block ${count(block)}, used by ${name}` };
}

byId("search").addEventListener("submit", (event) => {
  event.preventDefault();
  const { found, told } = search(byId("query").value);
  byId("query").setAttribute("aria-invalid", String(!found));
  if (!found && paint.follow) { paint.follow = null; update(); }
  say("found", told);
  if (found) picture.focus({ preventScroll: true });
});
