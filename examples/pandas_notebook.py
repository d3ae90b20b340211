"""Rows of a pandas frame get columns of answers, in the cells of a notebook."""

# %% Rows
import pandas as pd

import raymoe

frame = pd.DataFrame(
    [
        {"id": 1, "prompt": "date: 5 March 2024 ->"},
        {"id": 2, "prompt": "amount: EUR 1.234,50 ->"},
        {"id": 3, "prompt": "name: Dr. Ada B. Lovelace ->"},
    ]
)

# %% The model stays in memory until close(), so that the next cell can be run again.
generator = raymoe.MoEGenerator(
    raymoe.demo_model_path(),  # or a name on the hub
    sampling_params={"max_tokens": 16, "temperature": 0.0},
)

# %% A frame in, the same frame with more columns out
frame = generator(frame)
print(frame[["prompt", "generated_text", "__inference_error__"]].to_string())

# %% Free the memory
generator.close()
