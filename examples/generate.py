"""The engine without Ray: prompts, token ids and chat messages in one call."""

import raymoe
from raymoe.assets import demo_model_path


def main() -> None:
    prompts = [
        "phone: (212) 555-0147 ext. 9 ->",
        [1, *range(40, 60)],
        [{"role": "user", "content": "amount: EUR 1.234,50"}],
        "",
    ]
    config = raymoe.EngineConfig(dtype="auto", device="cpu")
    params = raymoe.SamplingParams(max_tokens=16, temperature=0.0, logprobs=0)
    with raymoe.Engine.from_pretrained(demo_model_path(), config) as engine:
        for prompt, answer in zip(prompts, engine.generate(prompts, params), strict=True):
            print(f"{prompt!r}\n  {answer.text!r}, {answer.finish_reason} {answer.error}")
            if answer.logprobs:
                print(f"  log probability {sum(one.logprob for one in answer.logprobs):.2f}")
        print(engine.stats())


if __name__ == "__main__":
    main()
