#!/bin/sh
# Limits what this container sends to MBPS megabits a second, then becomes the command.
set -eu
: "${MBPS:?set MBPS, megabits a second}"
# 50 ms of queue: long enough for TCP at this rate, short enough that messages do not wait in it.
tc qdisc add dev eth0 root tbf rate "${MBPS}mbit" burst 32kbit latency 50ms
exec "$@"
