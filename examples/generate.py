"""The engine without Ray: a text, token ids and chat messages in one call.

python examples/generate.py
"""

import raymoe


def main() -> None:
    prompts = [
        "phone: (415) 555-2671 ext. 9 ->",
        [1, *range(40, 60)],  # token ids
        [{"role": "user", "content": "amount: EUR 1.234,50"}],
        "",  # a bad row: its generation says why
    ]
    config = raymoe.EngineConfig(dtype="auto", device="cpu")
    params = raymoe.SamplingParams(max_tokens=16, temperature=0.0, logprobs=0)
    with raymoe.Engine.from_pretrained(raymoe.demo_model_path(), config) as engine:
        for prompt, answer in zip(prompts, engine.generate(prompts, params), strict=True):
            print(prompt)
            if answer.finish_reason == "error":
                print(f"  {answer.error}")
                continue
            logprob = sum(token.logprob for token in answer.logprobs)
            print(f"  {answer.text!r}, {answer.finish_reason}, log probability {logprob:.2f}")
        stats = engine.stats()
        print(f"{stats.num_generated_tokens} tokens in {stats.num_steps} steps")


if __name__ == "__main__":
    main()
