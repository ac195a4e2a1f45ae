// Answers of a folder that `moq-hf export --names hub` wrote, in transformers.js and in the WASM engine of browsers.
//
//     node hub_names.mjs FOLDER TASK TEXTS.json    # TASK is classify or generate; prints JSON, by dtype
import { existsSync, readFileSync } from 'node:fs';
import { basename, dirname } from 'node:path';
import { AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, env } from '@huggingface/transformers';
import * as web from 'onnxruntime-web';

const [folder, task, file] = process.argv.slice(2);
const texts = JSON.parse(readFileSync(file));
const suffixes = { fp32: '', q8: '_quantized', q4: '_q4', q2: '_q2' };
env.allowRemoteModels = false;
env.localModelPath = dirname(folder);
web.env.wasm.numThreads = 1;

const name = basename(folder);
const tokenizer = await AutoTokenizer.from_pretrained(name);
const engines = { 'transformers.js': {}, wasm: {} };
for (const [dtype, suffix] of Object.entries(suffixes)) {
  const path = `${folder}/onnx/model${suffix}.onnx`;
  if (!existsSync(path)) continue;
  const options = { dtype, session_options: { intraOpNumThreads: 1 } };
  if (task === 'generate') {
    const model = await AutoModelForCausalLM.from_pretrained(name, options);
    engines['transformers.js'][dtype] = async (text) => {
      const inputs = await tokenizer(text);
      const tokens = await model.generate({ ...inputs, max_new_tokens: 16, do_sample: false });
      return tokens.tolist()[0].map(Number).slice(inputs.input_ids.dims[1]);
    };
    continue;
  }
  const model = await AutoModelForSequenceClassification.from_pretrained(name, options);
  engines['transformers.js'][dtype] = async (text) => (await model(await tokenizer(text))).logits.tolist()[0];
  const session = await web.InferenceSession.create(readFileSync(path), { logSeverityLevel: 3 });
  engines.wasm[dtype] = async (text) => {
    const inputs = await tokenizer(text);
    const tensors = session.inputNames.map((key) => [key, new web.Tensor('int64', inputs[key].data, inputs[key].dims)]);
    return Array.from((await session.run(Object.fromEntries(tensors))).logits.data);
  };
}

const found = {};
for (const [engine, files] of Object.entries(engines)) {
  found[engine] = {};
  for (const [dtype, answer] of Object.entries(files)) {
    found[engine][dtype] = { answers: [], milliseconds: [] };
    for (const text of texts) found[engine][dtype].answers.push(await answer(text));
  }
  // In turns, so that whatever else the machine does slows all of them.
  for (let count = 0; count < 31; count++) {
    for (const [dtype, answer] of Object.entries(files)) {
      const start = performance.now();
      await answer(texts[0]);
      found[engine][dtype].milliseconds.push(performance.now() - start);
    }
  }
  for (const measured of Object.values(found[engine])) {
    measured.milliseconds = measured.milliseconds.sort((a, b) => a - b)[15];
  }
}
console.log(JSON.stringify(found));
