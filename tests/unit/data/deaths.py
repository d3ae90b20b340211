"""What killed processes leave."""

import os

from raymoe.data.quarantine import InFlightFile


def die(directory, inside, *, left=(), alone=False):
    """Leave what a killed process leaves."""
    file = InFlightFile(directory)
    if left:
        file.record(entered=left)
    file.record(entered=inside, left=left, alone=alone)
    os.close(file._file)
