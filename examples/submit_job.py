"""Submit the main job to a running cluster and follow it to its end.

The same by hand, with the head's dashboard forwarded by `ray dashboard cluster.yaml`:

    ray job submit --address http://127.0.0.1:8265 -- raymoe generate \
        --model mistralai/Mixtral-8x7B-Instruct-v0.1 --input /data/prompts/ \
        --output /data/answers --id-column id --resume --num-actors 16
"""

import shlex
import sys
import time
from typing import Annotated

import typer
from ray.job_submission import JobStatus, JobSubmissionClient

POLL_S = 2.0


def main(
    arguments: Annotated[list[str], typer.Argument(help="Of raymoe generate, behind --.")],
    address: Annotated[str, typer.Option(help="Of the dashboard.")] = "http://127.0.0.1:8265",
    job_id: Annotated[str | None, typer.Option(help="To find the job again.")] = None,
) -> None:
    """Run `raymoe generate ARGUMENTS` on the cluster; the exit code is that of the job."""
    client = JobSubmissionClient(address)
    job = client.submit_job(
        entrypoint=shlex.join(["raymoe", "generate", *arguments]), submission_id=job_id
    )
    print(f"job {job}; stop it with: ray job stop --address {address} {job}", file=sys.stderr)
    printed = 0
    while True:
        status = client.get_job_status(job)
        logs = client.get_job_logs(job)
        print(logs[printed:], end="", flush=True)
        printed = len(logs)
        if status.is_terminal():
            break
        time.sleep(POLL_S)
    sys.exit(0 if status == JobStatus.SUCCEEDED else 1)


if __name__ == "__main__":
    typer.run(main)
