# README's first command in a container; on a machine with an NVIDIA GPU add --gpus all:
#
#   docker build -t dbsl . && docker run --rm -v "$PWD/runs:/dbsl/runs" dbsl
#   docker run --rm --gpus all --shm-size 2g dbsl train.py --small-ratio 0.25 --report-to none
FROM python:3.12-slim

WORKDIR /dbsl
COPY requirements.txt .
RUN pip install --no-cache-dir -r requirements.txt
COPY . .
ENTRYPOINT ["accelerate", "launch"]
CMD ["train.py", "--small-ratio", "0.1"]
