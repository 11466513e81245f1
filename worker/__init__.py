"""A worker that speaks RQ: claims jobs, owns their contexts, mirrors them, and hands them on."""
