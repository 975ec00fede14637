"""Trains with onnxruntime and numpy alone: `python train.py` takes 20 steps with the batch of the export.

Replace `batches` by your data, and pass a learning rate, or one for each step, to `train`.
"""

import itertools
import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime as ort

FOLDER = Path(__file__).resolve().parent
TYPES = {
    "F32": "<f4",
    "F64": "<f8",
    "F16": "<f2",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "i1",
    "U8": "u1",
    "BOOL": "?",
}


def read(name):
    """The arrays of a safetensors file: eight bytes with the size of a JSON header, the header, the data."""
    data = (FOLDER / name).read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    arrays = {}
    for key, entry in header.items():
        if key != "__metadata__":
            begin, end = (start + offset for offset in entry["data_offsets"])
            arrays[key] = np.frombuffer(data[begin:end], TYPES[entry["dtype"]]).reshape(entry["shape"]).copy()
    return arrays


def write(name, arrays):
    codes = {np.dtype(code): key for key, code in TYPES.items()}
    header, parts, end = {}, [], 0
    for key, array in arrays.items():
        parts.append(np.ascontiguousarray(array).tobytes())
        offsets = [end, end := end + len(parts[-1])]
        header[key] = {"dtype": codes[array.dtype], "shape": list(array.shape), "data_offsets": offsets}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    unfinished = FOLDER / f"{name}.unfinished"
    unfinished.write_bytes(b"".join([len(text).to_bytes(8, "little"), text, *parts]))
    unfinished.replace(FOLDER / name)


def session(name):
    return ort.InferenceSession(str(FOLDER / name), providers=["CPUExecutionProvider"])


def train(batches, learning_rate=1e-3, seed=0):
    """Yields the loss and the logged values of each step; leaves parameters and optimizer state in the folder.

    New values are written into the second of two sets of arrays, which the next step reads: nothing is copied.

    Args:
        batches: dictionaries of arrays.
        learning_rate: a number, or an iterable of one for each step.
        seed: the seed of the first step's dropout; those of the next steps follow. To go on from earlier steps, pass
            their number, since the same seeds would drop the same values again.
    """
    rates = itertools.repeat(learning_rate) if isinstance(learning_rate, (int, float)) else iter(learning_rate)
    step = session("train_step.onnx")
    state = {**read("parameters.safetensors"), **read("optimizer.safetensors")}
    now = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in state.items()}
    new = {name: ort.OrtValue.ortvalue_from_numpy(np.empty_like(array)) for name, array in state.items()}
    given = {value.name for value in step.get_inputs()}
    reports = [value.name for value in step.get_outputs() if not value.name.endswith(".next")]
    try:
        for k, batch in enumerate(batches):
            rate = next(rates, None)
            if rate is None:
                raise ValueError(f"learning_rate ends after {k} steps, before the batches. Pass one for each batch.")
            numbers = {"learning_rate": np.array(rate, np.float32), "seed": np.array(seed + k, np.int64)}
            binding = step.io_binding()
            for name in state:
                # A step can replace a value without reading it.
                if name in given:
                    binding.bind_ortvalue_input(name, now[name])
                binding.bind_ortvalue_output(f"{name}.next", new[name])
            for name, array in {**numbers, **batch}.items():
                if name in given:
                    binding.bind_cpu_input(name, np.asarray(array, order="C"))
            for name in reports:
                binding.bind_output(name)
            step.run_with_iobinding(binding)
            now, new = new, now
            results = binding.get_outputs()[len(state) :]
            yield {name: float(value.numpy()) for name, value in zip(reports, results, strict=True)}
    finally:  # also if the caller takes no more steps, or a batch is at fault
        parameters = read("parameters.safetensors")
        arrays = {name: value.numpy() for name, value in now.items()}
        write("parameters.safetensors", {name: arrays[name] for name in arrays if name in parameters})
        write("optimizer.safetensors", {name: arrays[name] for name in arrays if name not in parameters})


def run(name, batch):
    """The outputs of eval_step.onnx or predict.onnx with the parameters of the folder."""
    model = session(name)
    values = {**read("parameters.safetensors"), **batch}
    outputs = [value.name for value in model.get_outputs()]
    results = model.run(outputs, {value.name: values[value.name] for value in model.get_inputs()})
    return dict(zip(outputs, results, strict=True))


def batches(count):
    for _ in range(count):
        yield read("batch.safetensors")


if __name__ == "__main__":
    for number, report in enumerate(train(batches(int(sys.argv[1]) if len(sys.argv) > 1 else 20))):
        print(number, *(f"{name} {value:.5f}" for name, value in report.items()))
