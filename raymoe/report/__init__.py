"""What happened in a run, as one page that anyone can open: made from the files of its status."""
