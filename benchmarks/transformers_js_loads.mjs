// Checks that transformers.js loads an encoder's standalone graphs, and gives the vectors of the torch model.
//
//     npm install --prefix PATH @huggingface/transformers
//     NODE_PATH=PATH/node_modules node benchmarks/transformers_js_loads.mjs FOLDER
//
// See embeddings_loads.py, which writes FOLDER/vectors.json first.

import { existsSync, readFileSync } from 'node:fs';
import { createRequire } from 'node:module';
import { basename, dirname, resolve } from 'node:path';
import { pathToFileURL } from 'node:url';

const LEAST = { fp32: 0.99999, fp16: 0.9999, q8: 0.99, int8: 0.99, q4: 0.9 };
const SUFFIX = { fp32: '', fp16: '_fp16', q8: '_quantized', int8: '_int8', q4: '_q4' };

const found = createRequire(import.meta.url).resolve('@huggingface/transformers');
const { AutoModel, AutoTokenizer, env, pipeline } = await import(pathToFileURL(found));
const folder = resolve(process.argv[2]);
const { texts, vectors } = JSON.parse(readFileSync(`${folder}/vectors.json`, 'utf8'));
env.localModelPath = dirname(folder);
env.allowRemoteModels = false;
console.log(`transformers.js ${env.version}, node ${process.version}`);

function leastCosine(rows) {
    const length = (row) => Math.sqrt(row.reduce((sum, value) => sum + value * value, 0));
    return Math.min(
        ...rows.map((row, index) => {
            const product = row.reduce((sum, value, at) => sum + value * vectors[index][at], 0);
            return product / length(row) / length(vectors[index]);
        }),
    );
}

let failed = false;
for (const [dtype, least] of Object.entries(LEAST)) {
    if (!existsSync(`${folder}/onnx/model${SUFFIX[dtype]}.onnx`)) continue;
    const extractor = await pipeline('feature-extraction', basename(folder), { dtype });
    const pooled = await extractor(texts, { pooling: 'mean', normalize: true });
    const tokenizer = await AutoTokenizer.from_pretrained(basename(folder));
    const model = await AutoModel.from_pretrained(basename(folder), { dtype });
    const output = await model(await tokenizer(texts, { padding: true, truncation: true }));
    for (const [name, rows] of [['pipeline', pooled], ['sentence_embedding', output.sentence_embedding]]) {
        if (rows === undefined) continue;
        const near = leastCosine(rows.tolist());
        failed ||= !(near >= least);
        console.log(`${dtype}, ${name}: cosine at least ${near.toFixed(6)} (limit ${least})`);
    }
}
process.exit(failed ? 1 : 0);
