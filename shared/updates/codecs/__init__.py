"""The stages of a codec, one file each, and the pipeline that chains them.

Adding a stage means adding a file with `STAGES`.
"""
