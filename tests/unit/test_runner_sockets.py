"""The count of sockets from the kernel's text."""

from __future__ import annotations

from runner.server.sockets import count_sockets

SOCKSTAT = b"sockets: used 23\nTCP: inuse 3 orphan 0 tw 0 alloc 4 mem 177\nUDP: inuse 2 mem 90\n"
PROTOCOLS = b"""protocol  size sockets  memory press maxhdr  slab module     cl co
TCPv6     2432      2     177   no     192   yes  kernel      y  y
UNIX-STREAM 1152      4      -1   NI       0   yes  kernel      y  y
UNIX      1152      5      -1   NI       0   yes  kernel      y  y
UDP       1344      2      90   NI       0   yes  kernel      y  y
TCP       2304      3     177   no     192   yes  kernel      y  y
NETLINK   1096      1      -1   NI       0   no   kernel      y  y
"""


def test_unix_sockets_are_left_out_and_unbound_datagram_sockets_are_not() -> None:
    """Of 23 sockets 9 are Unix's and 5 TCP's; the table shows 3 others, the rest are not bound yet."""
    assert count_sockets(SOCKSTAT, PROTOCOLS) == (14, 9)
