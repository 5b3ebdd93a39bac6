#!/bin/sh
# PID 1 of the test machine: a pure cgroup v2 tree, the plan that lies on the project's disk, then off.
# vda is the root, vdb the project, vdc a disk with project quotas; whatever is written to them is thrown away.
export PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C.UTF-8 HOME=/root
mount -t proc none /proc
mount -t sysfs none /sys
mount -t tmpfs none /run
mount -t ext4 -o noatime /dev/vdb /project
mount -t ext4 -o noatime,prjquota /dev/vdc /data
mount -t cgroup2 none /sys/fs/cgroup
mkdir -p /dev/pts /dev/shm
mount -t devpts none /dev/pts
mount -t tmpfs none /dev/shm
modprobe -a overlay loop
hostname guest
ip link set lo up 2>/dev/null || busybox ip link set lo up
echo "guest: $(uname -r), controllers $(cat /sys/fs/cgroup/cgroup.controllers)"
echo "guest: project quota $(grep -o prjquota /proc/mounts || echo missing)"
echo "guest: booted after $(cut -d ' ' -f 1 /proc/uptime) s"
if [ -e /project/guest-systemd ]; then # the work is a unit, guest-work.service
	cd / && exec /lib/systemd/systemd
fi
# As under systemd: no test runs in the root cgroup, and parents hand controllers down.
echo "+cpu +memory +pids" >/sys/fs/cgroup/cgroup.subtree_control
cd /project || exit 1
workers=$(cat guest-workers)
for worker in $(seq "$workers"); do
	mkdir -p "/sys/fs/cgroup/worker-$worker" "/data/worker-$worker"
	(
		# A worker sees only what is its own: its cgroup, its temporary files, its mounts.
		sh -c 'echo $PPID' >"/sys/fs/cgroup/worker-$worker/cgroup.procs"
		export WORKER="$worker" WORKERS="$workers" TMPDIR="/data/worker-$worker"
		exec unshare --mount sh -c 'mount -t tmpfs none /run; mount -t tmpfs none /dev/shm; exec sh ./guest-work'
	) >"/data/output-$worker" 2>&1 </dev/null &
	eval "pid_$worker=$!"
done
for worker in $(seq "$workers"); do
	eval "wait \$pid_$worker"
	status=$?
	cat "/data/output-$worker"
	echo "guest: worker $worker: exit status $status"
done
echo "guest: done after $(cut -d ' ' -f 1 /proc/uptime) s"
echo o >/proc/sysrq-trigger
sleep 60
