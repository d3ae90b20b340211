"""Submit the main job to a running cluster and follow it to its end.

    ray dashboard cluster.yaml &     # brings the head's port 8265 to this machine
    python examples/submit_job.py -- --model mistralai/Mixtral-8x7B-Instruct-v0.1 \
        --input /data/prompts/ --output /data/answers --id-column id --resume --num-actors 16

The same by hand:

    RAY_AUTH_MODE=token ray job submit --address http://127.0.0.1:8265 -- raymoe generate \
        --model mistralai/Mixtral-8x7B-Instruct-v0.1 --input /data/prompts/ \
        --output /data/answers --id-column id --resume --num-actors 16

A head asks for a token if there is one where it starts: in RAY_AUTH_TOKEN, in the file that
RAY_AUTH_TOKEN_PATH names, or in ~/.ray/auth_token, which `ray.init()` writes on any machine. Ray's
client sends one only with RAY_AUTH_MODE=token; this script sends it wherever there is one.
"""

import os
import re
import shlex
import sys
import time
import urllib.error
import urllib.request
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient

POLL_S = 2.0
ANSWER_S = 10.0


def main(
    arguments: Annotated[list[str], typer.Argument(help="Those of raymoe generate, behind --.")],
    address: Annotated[
        str, typer.Option(help="Where the head's dashboard is.")
    ] = "http://127.0.0.1:8265",
    job_id: Annotated[
        str | None, typer.Option(help="A name for the job, to find it again.")
    ] = None,
) -> None:
    """Run `raymoe generate ARGUMENTS` on the cluster; the exit code is that of the job."""
    address = address if "://" in address else f"http://{address}"
    token = where_the_token_is()
    if token:
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    # Ray would take RAY_ADDRESS, where it is set, instead of --address.
    os.environ["RAY_API_SERVER_ADDRESS"] = address
    try:
        check_that_somebody_answers(address)
        # Not before: Ray reads RAY_AUTH_MODE when it is imported.
        from ray.job_submission import JobSubmissionClient  # noqa: PLC0415

        client = JobSubmissionClient(address)
        entrypoint = shlex.join(["raymoe", "generate", *arguments])
        job = client.submit_job(entrypoint=entrypoint, submission_id=job_id)
    except Exception as error:
        reason = why_not_submitted(error, address, token, job_id)
        if reason is None:
            raise
        sys.exit(reason)
    print(f"job {job}; stop it with: {by_hand('stop', address, job)}", file=sys.stderr)
    how_to_follow = f"follow it with: {by_hand('logs --follow', address, job)}"
    try:
        follow(client, job)
    except KeyboardInterrupt:
        print(f"job {job} goes on; {how_to_follow}", file=sys.stderr)
        sys.exit(130)
    except OSError:
        sys.exit(f"lost {address}; job {job} goes on if the head does; {how_to_follow}")


def where_the_token_is() -> str | None:
    """Return the first of the three places where Ray looks for a token that has one."""
    if os.environ.get("RAY_AUTH_TOKEN"):
        return "RAY_AUTH_TOKEN"
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    return str(path) if path.is_file() else None


def check_that_somebody_answers(address: str) -> None:
    """Raise OSError if nobody does: Ray's client waits for ever for a server that is silent."""
    try:
        urllib.request.urlopen(f"{address}/api/version", timeout=ANSWER_S).close()
    except urllib.error.HTTPError as error:
        error.close()  # an answer, such as that a token is missing


def why_not_submitted(
    error: Exception, address: str, token: str | None, job_id: str | None
) -> str | None:
    """Return what went wrong and what to do, in a sentence; None if this is not known."""
    from ray.exceptions import AuthenticationError  # noqa: PLC0415

    text = str(error)
    if isinstance(error, AuthenticationError) and token is None:
        return (
            f"the head at {address} asks for a token and this machine has none: copy "
            "~/.ray/auth_token from the machine that started the head, or set RAY_AUTH_TOKEN"
        )
    if isinstance(error, AuthenticationError):
        return (
            f"the head at {address} refuses the token in {token}: it must be that of the machine "
            "that started the head, where `RAY_AUTH_MODE=token ray get-auth-token` prints it"
        )
    if "already exists" in text:
        follow_it = by_hand("logs --follow", address, str(job_id))
        return (
            f"job {job_id} was submitted before: give another --job-id, or follow it: {follow_it}"
        )
    if isinstance(error, ValueError | HTTPException) or "Version check returned" in text:
        return f"what answers at {address} is not the dashboard of a Ray head: correct --address"
    if isinstance(error, OSError):
        return (
            f"no head answers at {address} ({getattr(error, 'reason', error)}): forward its "
            "dashboard with `ray dashboard cluster.yaml`, or correct --address"
        )
    found = re.search(r"^\S*(?:Error|Exception): .*", text, re.MULTILINE)
    return f"the head at {address} could not take the job: {found[0]}" if found else None


def by_hand(command: str, address: str, job: str) -> str:
    """Return a command that works in the shell where this script was started."""
    mode = "RAY_AUTH_MODE=token " if os.environ.get("RAY_AUTH_MODE") == "token" else ""
    return f"{mode}ray job {command} --address {address} {job}"


def follow(client: "JobSubmissionClient", job: str) -> None:
    """Print the log of the job until it ends; exit with a sentence if it did not succeed."""
    printed = 0
    while True:
        status = client.get_job_status(job)
        logs = client.get_job_logs(job)
        print(logs[printed:], end="", flush=True)
        printed = len(logs)
        if status.is_terminal():
            break
        time.sleep(POLL_S)
    if status != "SUCCEEDED":
        reason = client.get_job_info(job).message or "no reason was given"
        sys.exit(f"job {job} {status.lower()}: {reason.partition(', last available logs')[0]}")


if __name__ == "__main__":
    typer.run(main)
