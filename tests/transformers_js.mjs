// Prints the vectors that transformers.js computes with a graph of an encoder, as the last line; by itself, where
// transformers.js is, or ends with 3 if it is not installed. See test_other_programs.py.
//
//     NODE_PATH=PATH/node_modules node tests/transformers_js.mjs FOLDER DTYPE TEXTS

import { createRequire } from 'node:module';
import { basename, dirname, resolve } from 'node:path';
import { pathToFileURL } from 'node:url';

let found;
try {
    found = createRequire(import.meta.url).resolve('@huggingface/transformers');
} catch {
    process.exit(3);
}
if (process.argv.length < 5) {
    console.log(found);
    process.exit(0);
}
const { env, pipeline } = await import(pathToFileURL(found));
const [folder, dtype, texts] = process.argv.slice(2);
env.localModelPath = dirname(resolve(folder));
env.allowRemoteModels = false;
const extractor = await pipeline('feature-extraction', basename(folder), { dtype });
const vectors = await extractor(JSON.parse(texts), { pooling: 'mean', normalize: true });
console.log(`\n${JSON.stringify(vectors.tolist())}`);
