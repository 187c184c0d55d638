"""Find models, their knobs and their workload in files, without running any code of them."""
