"""Two models in one pipeline: one generates, the other judges, and the good answers are counted.

python examples/generate_and_judge.py
"""

import ray

import raymoe


def pipeline(ds, writer, judge, verdicts=("good", "bad"), **options):
    """Return ``topic, count()``: for each topic, the answers that got the first verdict."""
    # Each generator plans with its part of a node.
    options |= {"num_generators": 2, "temperature": 0.0}
    ds = raymoe.generate(ds, writer, max_tokens=16, **options)
    ds = ds.filter(lambda row: row["finish_reason"] != "error" and row["generated_text"])
    ds = ds.map(as_question)
    choice = {"choice": list(verdicts)}
    ds = raymoe.generate(ds, judge, max_tokens=8, structured_outputs=choice, **options)
    ds = ds.filter(lambda row: row["generated_text"] == verdicts[0])
    return ds.groupby("topic").count()


def as_question(row):
    question = f"Question: {row['prompt']}\nAnswer: {row['generated_text']}\nIs it good or bad? "
    return {"id": row["id"], "topic": row["topic"], "prompt": question}


if __name__ == "__main__":
    rows = [
        {"id": day, "topic": "date" if day % 2 else "day", "prompt": f"date: {day} March 2024 ->"}
        for day in range(1, 29)
    ]
    model = raymoe.demo_model_path()  # or two names on the hub
    print(pipeline(ray.data.from_items(rows), model, model).to_pandas())
