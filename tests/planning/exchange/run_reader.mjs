// Run examples/exchange_reader.mjs on the cases of this folder, and print the results as JSON.
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { Refusal, canonical, copy, readDocument, readTables, runs } from "../../../examples/exchange_reader.mjs";

function result(folder, one) {
  const bytes = (name) => readFileSync(join(folder, name));
  const end = ({ document: name, tables, rank }) => {
    const document = readDocument(bytes(name));
    return { document, rank, tables: tables && readTables(bytes(tables), document) };
  };
  try {
    if (one.copy) return { runs: copy(...one.copy.map(end)) };
    const own = end(one);
    if (one.layer) return { runs: runs(own, one.layer, one.field, one.rows) };
    return { digest: own.document.digest };
  } catch (problem) {
    if (problem instanceof Refusal) return { refused: problem.code };
    throw problem;
  }
}

if (process.argv[2]) {
  const cases = JSON.parse(readFileSync(join(process.argv[2], "cases.json")));
  const results = Object.entries(cases).map(([name, one]) => [name, result(process.argv[2], one)]);
  console.log(canonical(Object.fromEntries(results)));
}
