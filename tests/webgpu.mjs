// Prints what onnxruntime-node computes on WebGPU with a graph, as the last line: {"values": [...], "dims": [...]} of
// the first output; or ends with 3 if onnxruntime-node is not installed. See test_other_programs.py.
//
//     NODE_PATH=PATH/node_modules node tests/webgpu.mjs GRAPH '{"ids": [[...]], "mask": [[...]]}'

import { createRequire } from 'node:module';
import { pathToFileURL } from 'node:url';

let found;
try {
    found = createRequire(import.meta.url).resolve('onnxruntime-node');
} catch {
    process.exit(3);
}
if (process.argv.length < 4) process.exit(0);
const { default: ort } = await import(pathToFileURL(found));
const [graph, given] = process.argv.slice(2);
const { ids, mask } = JSON.parse(given);

function integers(rows) {
    return new ort.Tensor('int64', BigInt64Array.from(rows.flat().map(BigInt)), [rows.length, rows[0].length]);
}

const options = { executionProviders: ['webgpu'], intraOpNumThreads: 1, logSeverityLevel: 4 };
const session = await ort.InferenceSession.create(graph, options);
const feed = { input_ids: integers(ids), attention_mask: integers(mask) };
for (const { name, shape } of session.inputMetadata) {
    if (name === 'token_type_ids') feed[name] = integers(ids.map((row) => row.map(() => 0)));
    if (name.startsWith('past')) {
        feed[name] = new ort.Tensor('float32', new Float32Array(0), [ids.length, shape[1], 0, shape[3]]);
    }
}
const outputs = await session.run(feed);
const { data, dims } = outputs[session.outputNames[0]];
process.stdout.write(`\n${JSON.stringify({ values: Array.from(data), dims })}\n`, () => process.exit(0));
