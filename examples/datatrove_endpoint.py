"""Documents of datatrove get answers from `raymoe serve`, which batches what runs at once.

raymoe serve --model MODEL --served-model-name demo --directory /tmp/serve
python examples/datatrove_endpoint.py http://127.0.0.1:8000 /tmp/answers
"""

import sys

from datatrove.data import Document
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.inference.run_inference import InferenceConfig, InferenceRunner
from datatrove.pipeline.writers import JsonlWriter

url, output = sys.argv[1:]
texts = ["date: 5 March 2024 ->", "amount: EUR 1.234,50 ->", "name: Dr. Ada B. Lovelace ->"]
documents = [Document(text=text, id=str(i)) for i, text in enumerate(texts, 1)]


async def answer(document, generate):
    return await generate({"prompt": document.text, "max_tokens": 16, "temperature": 0.0})


endpoint = {"server_type": "endpoint", "endpoint_url": url, "use_chat": False}
config = InferenceConfig(model_name_or_path="demo", **endpoint)
runner = InferenceRunner(answer, config, JsonlWriter(output, compression=None))
LocalPipelineExecutor([documents, runner], logging_dir=f"{output}-logs").run()
