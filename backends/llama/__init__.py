"""The llama.cpp engine: one supervised child process per model."""
