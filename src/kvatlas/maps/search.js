// The search box: what is asked for, and where it is.
"use strict";

// "layer 3, head 5, token 100" in numbers by kind, or null where it is something else.
function termsOf(query) {
  const term = /(layer|head|token|block|rank)s?\s*(\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:[\s,;]+|$)/y, terms = {};
  while (term.lastIndex < query.length) {
    const found = term.exec(query);
    if (!found || found[1] in terms) return null;
    terms[found[1]] = Number(found[2].replaceAll(",", ""));
  }
  return query ? terms : null;
}

// Goes to what is asked for; whether it is there, and what there is to say of it.
function search(text) {
  const query = text.trim().toLowerCase(), terms = termsOf(query);
  const [, digits] = /^(?:address\s*)?(0x[0-9a-f]+|[\d,]+)$/.exec(query) || [];
  if (!query) { paint.follow = null; update(); return { found: true, told: "" }; }
  if (terms) return goToTerms(terms);
  if (digits !== undefined) return goToAddress(Number(digits.replaceAll(",", "")));
  if (query === "padding") return goToPadding();
  const name = data.names.findIndex((one) => `.${one.toLowerCase()}.`.includes(query));
  const region = name < 0 ? null : plan().regions.find((one) => one.layers.includes(name));
  if (!region) return missing(`nothing is called “${text.trim()}”: a layer's name, “head 5”, “token 100”, “block 7”, “padding” or an address is found`);
  return goToTerms({}, { name, region });
}

const missing = (told) => ({ found: false, told });
const numbers = (things, last) => `${things} 0 to ${count(last)}`;

// The first layer of a number, and the region that has it.
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

// A field that has heads or tokens, whichever are asked for: of a layer's region, or those of a group.
function fieldWith(axes, own) {
  for (const region of own.region ? [own.region] : regionsOf(plan(), own)) {
    if (axes.includes("N") && !region.tokens_per_state) continue;
    const field = plan().pages[region.page].fields.find((one) => !one.padding && axes.every((axis) => axisOf(one.box, axis)));
    if (field) return { region, field };
  }
  return null;
}

// What is wrong with a place, else null; the place is completed on the way.
function settle(terms, own, notes) {
  const mine = plan(), { head, token, block, rank } = terms;
  if (rank !== undefined) {
    if (rank >= mine.ranks) return `no rank ${rank}: ${numbers("ranks", mine.ranks - 1)}`;
    if (own.region && own.region.stage !== Math.floor(rank / mine.tp)) return `rank ${rank} has no such layer: it is of another stage`;
    Object.assign(own, { stage: Math.floor(rank / mine.tp), tpRank: rank % mine.tp });
  }
  const axes = axesOf(head, token);
  const groups = own.region ? [own.region.group] : [own.group, ...mine.groups.keys()];
  const group = groups.find((one) => (axes.length ? fieldWith(axes, { ...own, group: one }) : regionsOf(mine, { ...own, group: one }).length));
  if (group === undefined) return `no ${axes.map((axis) => ONE[axis]).join(" and ")} here: these layers keep none of their own`;
  own.group = group;
  return (head === undefined ? null : settleHead(head, terms, own, notes)) || settleBlock(token, block, own, notes);
}

// The rank that has a head of the whole model.
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

// The block of a token. Where none is named, tokens are those of a request that fills blocks from 0 on, in order.
function settleBlock(token, block, own, notes) {
  const pool = poolOf(plan(), own), each = plan().groups[own.group].block_size;
  if (block !== undefined && block >= pool.blocks) return `no block ${count(block)}: ${numbers("blocks", pool.blocks - 1)}`;
  if (block !== undefined && token >= each) return `no token ${count(token)} in a block: ${numbers("tokens", each - 1)}`;
  own.block = block ?? (token === undefined ? Math.min(own.block, pool.blocks - 1) : Math.floor(token / each));
  if (own.block >= pool.blocks) return `no token ${count(token)}: all blocks together hold ${numbers("tokens", pool.blocks * each - 1)}`;
  if (token === undefined) return null;
  own.token = token % each;
  if (block === undefined) notes.push(`token ${count(token)} is token ${own.token} of block ${count(own.block)}, where a request fills blocks from 0 on in order`);
  return null;
}

// Goes to a layer, head and token as near as they are known: to a cell, a page, or the pieces of a block.
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
    if (level === "cell") paint.follow = null; // all that is shown is it
    go({ level, region: point.region, index: point.at.L, at: point.at, field: point.field });
  }
  if (address !== null) pointTo(address);
  return { found: true, told: notes.join("; ") };
}

// What lights up: the finest of what is asked for.
function followed({ head }, found, { token }) {
  if (token !== undefined) return { kind: "token", value: token };
  if (head !== undefined) return { kind: "head", value: head };
  return found ? { kind: "layer", value: found.name } : null;
}

// The first byte of a head, a token, or both: of a layer, or the first that there is.
function placeOfTerms(head, own, layer) {
  const { region, field } = fieldWith(axesOf(head, own.token), own);
  const chosen = { layer: layer ? layer.name : region.layers[0], token: own.token, heads: head === undefined ? null : [head, head] };
  for (const index of layersApart(region, chosen)) {
    const [box] = narrowed(region, field, index, own.tpRank, chosen);
    if (box) return box[0] + own.block * axisOf(field.box, "B")[2];
  }
  return null;
}

// What was said of the last search and knob holds no more.
function forgetNotes() {
  say("found", "");
  knobsNote = "";
}

// Puts the cursor on a byte; where its row is left out of a sample, it is told of all the same.
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

// The first padding or unused byte of a block as a group holds it.
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
  return { found: true, told: `the first ${what} of block ${count(block)} as ${name} holds it` };
}

byId("search").addEventListener("submit", (event) => {
  event.preventDefault();
  const { found, told } = search(byId("query").value);
  byId("query").setAttribute("aria-invalid", String(!found));
  if (!found && paint.follow) { paint.follow = null; update(); }
  say("found", told);
  if (found) picture.focus({ preventScroll: true });
});
