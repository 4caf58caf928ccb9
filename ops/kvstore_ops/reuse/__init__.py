"""Lossy reuse by a pretrained model: the answers it keeps, and the time it takes. The benchmark reuse shows both.

The two are measured apart (``answers``, ``times``): answers are the same under any load, and need hours of one thread;
times are ratios in turns, and need minutes. Answers are kept in a run's file, prompt by prompt, so that a killed run
goes on where it was. ``subject`` has the model, its prompts and their caches, ``settings`` the rows.

    python -m kvstore_ops.reuse           # the answers of a full run; kvstore bench reuse times them, and has the table
    python -m kvstore_ops.reuse --anew    # other prompts judge a row that was chosen before; --times has their table

Cost: the first round takes three quarters of an hour of one thread of a processor that multiplies bf16, the second
more.
"""
