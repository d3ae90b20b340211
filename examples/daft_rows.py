"""Rows of a Daft frame get a column of answers, from an engine in a class of Daft's."""

import daft

import raymoe

ROWS = [
    {"id": 1, "prompt": "date: 5 March 2024 ->"},
    {"id": 2, "prompt": "amount: EUR 1.234,50 ->"},
    {"id": 3, "prompt": "name: Dr. Ada B. Lovelace ->"},
]


@daft.cls(max_concurrency=1, use_process=False)  # one engine, which batches the rows itself
class Answers:
    def __init__(self):
        self.engine = raymoe.Engine.from_pretrained(raymoe.demo_model_path())

    @daft.method.batch(return_dtype=daft.DataType.string())
    def __call__(self, prompts):
        params = {"max_tokens": 16, "temperature": 0.0}
        return [one.text for one in self.engine.generate(prompts.to_pylist(), params)]


frame = daft.from_pylist(ROWS)
frame = frame.with_column("generated_text", Answers()(daft.col("prompt")))
for row in frame.to_pylist():
    print(row["prompt"], row["generated_text"])
