#!/bin/sh
# PID 1 of the test machine: a pure cgroup v2 tree, the tests named on the kernel's command line, then off.
# The root disk is thrown away afterwards, the second disk has the project.
export PATH=/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C.UTF-8 HOME=/root PYTHONPATH=/opt/site-packages
mount -t ext4 /dev/vdb /project
mount -t cgroup2 none /sys/fs/cgroup
mkdir -p /dev/pts /dev/shm
mount -t devpts none /dev/pts
mount -t tmpfs none /dev/shm
modprobe overlay
hostname guest
echo "guest: $(uname -r), controllers $(cat /sys/fs/cgroup/cgroup.controllers)"
# As under systemd: the tests' own cgroup is not the root one, and its parent hands controllers down.
echo "+cpu +memory +pids" >/sys/fs/cgroup/cgroup.subtree_control
mkdir /sys/fs/cgroup/tests
echo $$ >/sys/fs/cgroup/tests/cgroup.procs
cd /project || exit 1
tests=$(sed 's/.*sandkasten.tests=\([^ ]*\).*/\1/; s/,/ /g' /proc/cmdline)
# shellcheck disable=SC2086 # several file names
python3 -m pytest -p no:cacheprovider -p no:hypothesispytest --color=no --durations=6 $tests 2>&1
echo "guest: exit status $?"
sync
echo o >/proc/sysrq-trigger
sleep 60
