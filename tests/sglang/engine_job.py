"""Runs one SGLang engine on a job of JSON and prints its answers: `python -m tests.sglang.engine_job JOB`.

JOB: {"model", "engine": arguments of sglang.Engine, "steps": [[token ids, …], …], "new_tokens"}. A step's prompts are
sent together, steps one after another. With "enable_mixed_chunk" answers have no log-probabilities, since SGLang mixes
no batch that is asked for some. An engine starts processes that import this file, hence the script.
"""

from __future__ import annotations

import json
import sys


def main() -> None:
    import sglang

    job = json.loads(sys.argv[1])
    engine = sglang.Engine(model_path=job["model"], device="cpu", log_level="info", **job["engine"])
    sampling = {"temperature": 0, "max_new_tokens": job["new_tokens"], "ignore_eos": True}
    scored = not job["engine"].get("enable_mixed_chunk")
    steps = []
    for prompts in job["steps"]:
        answers = engine.generate(input_ids=prompts, sampling_params=sampling, return_logprob=scored)
        steps.append(
            [
                {
                    "tokens": answer["output_ids"],
                    "cached": answer["meta_info"]["cached_tokens"],
                    "logprobs": [entry[0] for entry in answer["meta_info"].get("output_token_logprobs", [])],
                }
                for answer in answers
            ]
        )
    print("RESULT " + json.dumps(steps), flush=True)
    engine.shutdown()


if __name__ == "__main__":
    main()
