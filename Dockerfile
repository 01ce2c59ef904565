# Runs the README's first command: docker build -t mpcomp . && docker run --rm mpcomp
# Not tried yet: there was no Docker where it was written.
FROM python:3.11-slim
# An index with torch for the CPU; the default one brings gigabytes of CUDA.
ARG PIP_EXTRA_INDEX_URL
ENV OMP_NUM_THREADS=1
WORKDIR /mpcomp
COPY . .
RUN pip install --no-cache-dir -c constraints.txt -e ".[recipes]"
# The first block of commands, without its virtual environment.
RUN awk '/^```bash/ { inside = 1; next } /^```/ { if (inside) exit } inside && !/ -m venv /' README.md > first.sh
CMD ["sh", "-ex", "first.sh"]
