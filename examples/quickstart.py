"""The main job: a table of prompts in, the same table with generated text out, through Ray Data."""

import logging

import ray
import ray.data

import raymoe
from raymoe.assets import demo_model_path

# Without these Ray tells of its start, of each stage and of its progress; errors still come.
ray.init(logging_level="error")
ray.data.DataContext.get_current().enable_progress_bars = False
logging.getLogger("ray.data").setLevel("ERROR")

rows = [{"id": day, "prompt": f"date: {day} March 2024 ->"} for day in range(1, 29)]
dataset = ray.data.from_items(rows)
arguments = raymoe.map_batches_kwargs(
    model_source=str(demo_model_path()),  # or "mistralai/Mixtral-8x7B-Instruct-v0.1"
    ds=dataset,
    sampling_params={"max_tokens": 16, "temperature": 0.0},
    id_column="id",
)
dataset = dataset.repartition(target_num_rows_per_block=arguments["batch_size"], strict=True)
for row in dataset.map_batches(raymoe.MoEGenerator, **arguments).take(5):
    print(row["prompt"], row["generated_text"], row["__inference_error__"])
