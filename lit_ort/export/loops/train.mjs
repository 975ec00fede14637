// Trains with onnxruntime-node (`node train.mjs` takes 20 steps with the batch of the export), and for train.html.
// Replace `batches` by your data.

const TYPES = {
  F16: ["float16", globalThis.Float16Array ?? Uint16Array], F32: ["float32", Float32Array], F64: ["float64", Float64Array], I64: ["int64", BigInt64Array],
  I32: ["int32", Int32Array], I16: ["int16", Int16Array], I8: ["int8", Int8Array], U8: ["uint8", Uint8Array],
  BOOL: ["bool", Uint8Array],
};

// The tensors of a safetensors file: eight bytes with the size of a JSON header, the header, the data.
export function parse(ort, bytes) {
  const start = 8 + Number(new DataView(bytes.buffer, bytes.byteOffset).getBigUint64(0, true));
  const entries = Object.entries(JSON.parse(new TextDecoder().decode(bytes.subarray(8, start))));
  return Object.fromEntries(entries.filter(([name]) => name !== "__metadata__").map(([name, entry]) => {
    const [begin, end] = entry.data_offsets, [type, Values] = TYPES[entry.dtype];
    const copy = bytes.slice(start + begin, start + end);
    return [name, new ort.Tensor(type, new Values(copy.buffer), entry.shape)];
  }));
}

// The bytes of a safetensors file with tensors.
export function format(tensors) {
  const header = {}, parts = [];
  let end = 0;
  for (const [name, {type, data, dims}] of Object.entries(tensors)) {
    const part = new Uint8Array(data.buffer, data.byteOffset, data.byteLength);
    const dtype = Object.keys(TYPES).find(key => TYPES[key][0] === type);
    header[name] = {dtype, shape: [...dims], data_offsets: [end, end += part.length]};
    parts.push(part);
  }
  let text = new TextEncoder().encode(JSON.stringify(header));
  text = new Uint8Array([...text, ...new Uint8Array((8 - text.length % 8) % 8).fill(32)]);
  const bytes = new Uint8Array(8 + text.length + end);
  new DataView(bytes.buffer).setBigUint64(0, BigInt(text.length), true);
  bytes.set(text, 8);
  let at = 8 + text.length;
  for (const part of parts) { bytes.set(part, at); at += part.length; }
  return bytes;
}

// Takes a step with each batch, and returns the new parameters and optimizer state. `read` returns the bytes of a file of
// the folder; `report` gets the number of each step, and its loss and logged values; `save` gets what is returned, also
// after an error. The learning rate is a number, or an iterable of one for each step. To go on from earlier steps, pass
// their number as `seed`, since the same seeds would drop the same values again.
export async function train(
  ort, read, batches, report, {learningRate = 1e-3, seed = 0, options = {}, save = () => {}} = {},
) {
  const step = await ort.InferenceSession.create(await read("train_step.onnx"), options);
  const parameters = parse(ort, await read("parameters.safetensors"));
  const optimizer = parse(ort, await read("optimizer.safetensors"));
  const state = {...parameters, ...optimizer};
  const part = like => Object.fromEntries(Object.keys(like).map(name => [name, state[name]]));
  const trained = () => ({parameters: part(parameters), optimizer: part(optimizer)});
  const rates = typeof learningRate === "number" ? null : learningRate[Symbol.iterator]();
  let number = 0;
  try {
    for await (const batch of batches) {
      const {value: rate, done} = rates ? rates.next() : {value: learningRate};
      if (done) throw new RangeError(`learningRate ends after ${number} steps, before the batches. Pass one for each batch.`);
      const numbers = {
        learning_rate: new ort.Tensor("float32", [rate], []),
        seed: new ort.Tensor("int64", [BigInt(seed + number)], []),
      };
      const values = {...numbers, ...batch, ...state};
      const results = await step.run(Object.fromEntries(step.inputNames.map(name => [name, values[name]])));
      const reported = {};
      for (const [name, tensor] of Object.entries(results)) {
        if (name.endsWith(".next")) state[name.slice(0, -5)] = tensor;
        else reported[name] = Number(tensor.data[0]);
      }
      report(number++, reported);
    }
  } finally {
    await save(trained());
  }
  return trained();
}

export async function* batches(ort, read, count) {
  for (let k = 0; k < count; k++) yield parse(ort, await read("batch.safetensors"));
}

// Whether Node runs this file, rather than importing it.
async function isMain() {
  if (typeof process === "undefined" || !process.argv?.[1]) return false;
  const [{realpathSync}, {fileURLToPath}] = await Promise.all([import("node:fs"), import("node:url")]);
  return realpathSync(process.argv[1]) === realpathSync(fileURLToPath(import.meta.url));
}

if (await isMain()) {
  const ort = (await import("onnxruntime-node")).default;
  const {readFile, rename, writeFile} = await import("node:fs/promises");
  const read = async name => new Uint8Array(await readFile(new URL(name, import.meta.url)));
  const show = (number, values) => console.log(number, ...Object.entries(values).map(([n, v]) => `${n} ${v.toFixed(5)}`));
  const save = async trained => {
    for (const [name, tensors] of Object.entries(trained)) {
      const [file, unfinished] = ["", ".unfinished"].map(end => new URL(`${name}.safetensors${end}`, import.meta.url));
      await writeFile(unfinished, format(tensors));
      await rename(unfinished, file);
    }
  };
  await train(ort, read, batches(ort, read, Number(process.argv[2] ?? 20)), show, {save});
}
