"""Rows of Hugging Face `datasets` get a column of answers; the operator maps Arrow batches.

For several machines, ray.data.from_huggingface(ds) and raymoe.generate do the same.
"""

from datasets import Dataset

import raymoe

ROWS = [
    {"id": 1, "prompt": "date: 5 March 2024 ->"},
    {"id": 2, "prompt": "amount: EUR 1.234,50 ->"},
    {"id": 3, "prompt": "name: Dr. Ada B. Lovelace ->"},
]

ds = Dataset.from_list(ROWS).with_format("arrow")
generator = raymoe.MoEGenerator(
    raymoe.demo_model_path(),  # or a name on the hub
    sampling_params={"max_tokens": 16, "temperature": 0.0},
)
# All rows in one call fill the engine; the fingerprint names the result, as an engine has no hash.
ds = ds.map(generator, batched=True, batch_size=None, new_fingerprint="answers-1")
generator.close()
for row in ds.with_format(None):
    print(row["prompt"], row["generated_text"], row["__inference_error__"])
