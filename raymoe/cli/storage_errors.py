"""Why did a file system refuse? Its own words, short and without secrets, and what may help."""

import re

MAX_REASON_CHARACTERS = 400

# Words of S3, Google Cloud Storage, Azure and Arrow; the first that is found counts.
_HELP = (
    ("Unrecognized filesystem type", "it takes a path, or s3://, gs://, abfs://, hdfs://, file://"),
    ("libjvm", "hdfs needs JAVA_HOME, HADOOP_HOME and CLASSPATH"),
    (r"NO_SUCH_BUCKET|Bucket '.*' not found|bucket does not exist|ContainerNotFound",
     "make the bucket or correct its name"),
    ("NETWORK_CONNECTION", "check the network, and for a store that is not Amazon's "
     "AWS_ENDPOINT_URL, or ?endpoint_override=HOST:PORT&scheme=http in the URI"),
    (r"REDIRECT|AuthorizationHeaderMalformed|HTTP status 301", "add ?region=REGION to the URI"),
    (r"ACCESS_DENIED|ACCESS_KEY|SIGNATURE|TOKEN|HTTP status 40[13]|OAuth2|PERMISSION_DENIED"
     r"|UNAUTHENTICATED|[Cc]redential|AuthenticationFailed|AuthorizationFailure",
     "give credentials that may do this, on every node: for s3 AWS_ACCESS_KEY_ID and "
     "AWS_SECRET_ACCESS_KEY, AWS_PROFILE or the machine's role; for gs "
     "GOOGLE_APPLICATION_CREDENTIALS or 'gcloud auth application-default login'"),
    (r"does not exist|No such file|NotFound|NOT_FOUND", "check the path"),
)  # fmt: skip


def reason_of(error: Exception) -> str:
    """Return the first line of an error, cut where it gets long."""
    text = (str(error) or type(error).__name__).splitlines()[0]
    text = re.sub(r" \(Request ID: [^)]*\)", "", text)
    if len(text) <= MAX_REASON_CHARACTERS:
        return text
    return text[: MAX_REASON_CHARACTERS - 3] + "..."


def help_for(error: Exception) -> str:
    """Return what may help, to be put behind the reason; "" where nothing is known."""
    text = str(error)
    return next((f"; {advice}" for words, advice in _HELP if re.search(words, text)), "")


def without_secrets(uri: str) -> str:
    """Return a URI without what is before an @ and behind a question mark: keys may be there."""
    scheme, _, rest = uri.partition("://")
    host, slash, path = rest.partition("?")[0].partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}"
