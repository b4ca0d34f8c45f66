"""The stages of codecs by family, and the pipeline that chains them. A new stage is a new file with `STAGES`."""
