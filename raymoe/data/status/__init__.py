"""How far is a job, and how well does it run? Small files beside it that anyone may read."""
