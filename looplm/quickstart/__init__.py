"""The main job, end to end, on this machine: `plan` says what is trained and for how long, `run` does it.

Above everything but the command line, since it uses everything: data, training, inference, evaluation, lab, report.
"""
