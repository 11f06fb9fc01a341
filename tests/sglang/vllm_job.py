"""Runs ZYFA under vLLM on the job of `engine_job`, in vLLM's own environment: `python vllm_job.py JOB`.

Prints the same answers; JOB's "engine" holds arguments of vllm.LLM.
"""

from __future__ import annotations

import json
import sys


def main() -> None:
    from vllm import LLM, SamplingParams

    job = json.loads(sys.argv[1])
    engine = LLM(job["model"], enforce_eager=True, **job["engine"])
    sampling = SamplingParams(temperature=0, max_tokens=job["new_tokens"], ignore_eos=True, logprobs=0)
    steps = []
    for prompts in job["steps"]:
        answers = engine.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
        steps.append(
            [
                {
                    "tokens": list(answer.outputs[0].token_ids),
                    "cached": answer.num_cached_tokens,
                    "logprobs": [
                        entry[token].logprob
                        for entry, token in zip(answer.outputs[0].logprobs, answer.outputs[0].token_ids, strict=True)
                    ],
                }
                for answer in answers
            ]
        )
    print("RESULT " + json.dumps(steps), flush=True)


if __name__ == "__main__":
    main()
