"""URIs of object stores: opened by pyarrow, and errors of stores with what may help."""

import re
from urllib.parse import quote

import pyarrow as pa
from pyarrow import fs

MAX_REASON_CHARACTERS = 400
GCS_RETRY_S = 60  # Arrow's own default waits for a quarter of an hour when there are no credentials
URI_CHARACTERS = "%/:@?&=+,;!$'()*~#"

# Words of S3, Google Cloud Storage, Azure, of Arrow and of the libraries of fsspec for them; the
# first that is found counts.
_NETWORK = (
    r"NETWORK_CONNECTION|Could not connect to the endpoint|Connect timeout|Cannot connect to host"
)
_HELP = (
    ("Unrecognized filesystem type", "it takes a path, or s3://, gs://, abfs://, hdfs://, hf://, file://"),
    ("libjvm", "hdfs needs JAVA_HOME, HADOOP_HOME and CLASSPATH"),
    (r"NO_SUCH_BUCKET|Bucket '.*' not found|(bucket|container) does not exist|ContainerNotFound",
     "make the bucket or correct its name"),
    (_NETWORK, "check the network, and for a store that is not Amazon's "
     "AWS_ENDPOINT_URL, or ?endpoint_override=HOST:PORT&scheme=http in the URI"),
    (r"REDIRECT|AuthorizationHeaderMalformed|HTTP status 301|header is malformed"
     r"|specified endpoint", "set AWS_REGION on every node, or add ?region=REGION to the URI"),
    (r"ACCESS_DENIED|ACCESS_KEY|SIGNATURE|TOKEN|HTTP status 40[13]|OAuth2|PERMISSION_DENIED"
     r"|UNAUTHENTICATED|[Cc]redential|AuthenticationFailed|AuthorizationFailure"
     r"|Access Denied|Access Key|[Ff]orbidden|signature|token|config profile|does not have storage",
     "give credentials that may do this, on every node: for s3 AWS_ACCESS_KEY_ID and "
     "AWS_SECRET_ACCESS_KEY, AWS_PROFILE or the machine's role; for gs "
     "GOOGLE_APPLICATION_CREDENTIALS or 'gcloud auth application-default login'"),
    (r"does not exist|No such file|NotFound|NOT_FOUND", "check the path"),
)  # fmt: skip


def open_uri(text: str) -> tuple[fs.FileSystem, str]:
    """Return the file system of a URI, and the path in it; nothing need be there.

    Raises:
        pyarrow.ArrowException, OSError: It is of an unknown kind, or its bucket cannot be found.
    """
    scheme, _, rest = text.partition("://")
    # What people write is not always a URI: blanks, brackets and other letters are quoted.
    uri = f"{scheme}://{quote(rest, safe=URI_CHARACTERS)}"
    if scheme in ("gs", "gcs") and "retry_limit_seconds" not in rest:
        uri += f"{'&' if '?' in rest else '?'}retry_limit_seconds={GCS_RETRY_S}"
    try:
        filesystem, path = fs.FileSystem.from_uri(uri)
    except (pa.ArrowException, OSError) as error:
        # Arrow's text has the URI as it was quoted, with what is secret in it.
        raise type(error)(str(error).replace(uri, without_secrets(text))) from None
    return filesystem, path


def reason_of(error: Exception) -> str:
    """Return the first line of an error, cut where it gets long."""
    text = (str(error) or type(error).__name__).splitlines()[0]
    text = re.sub(r" \(Request ID: [^()]*\)", "", text)
    if len(text) <= MAX_REASON_CHARACTERS:
        return text
    return text[: MAX_REASON_CHARACTERS - 3] + "..."


def help_for(error: Exception) -> str:
    """Return what may help, to be put behind the reason; "" where nothing is known."""
    text = str(error)
    return next((f"; {advice}" for words, advice in _HELP if re.search(words, text)), "")


def is_refusal(error: Exception) -> bool:
    """Whether an error is an answer of the store, and not that there is none."""
    return bool(help_for(error)) and re.search(_NETWORK, str(error)) is None


def without_secrets(uri: str) -> str:
    """Return a URI without what is before an @ and behind a question mark: keys may be there."""
    scheme, _, rest = uri.partition("://")
    if scheme == "hf":  # revision, configuration and split
        return uri
    host, slash, path = rest.partition("?")[0].partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}"
