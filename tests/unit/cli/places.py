"""Places of files for tests: this machine's, and of a file system that only Arrow knows."""

from pyarrow import fs

from raymoe.cli.storage import Location


def local(root, name):
    return Location.local(root / name)


def remote(root, name):
    """A file of a file system whose files do not grow; its root is a directory."""
    (root / "store" / "bucket").mkdir(parents=True, exist_ok=True)
    filesystem = fs.SubTreeFileSystem(str(root / "store"), fs.LocalFileSystem())
    return Location(filesystem, f"bucket/{name}", "store")


PLACES = {"local": local, "remote": remote}


def write_part(writer, *tables):
    """Write one part of these tables, as a task of Ray does, and count it."""
    name = writer.next_name()
    writer.shards.write(name, tables)
    writer.commit(name)
