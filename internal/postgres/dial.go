package postgres

import (
	"net"
	"time"
)

const (
	// TCP detects a dead machine: an idle connection sends keep-alive probes, and the peer must acknowledge sent data
	// within userTimeout. With the kernel's defaults a statement could wait for most of an hour.
	silentFor     = 15 * time.Second // without data, before the first probe
	probeInterval = 5 * time.Second
	probeCount    = 3
	userTimeout   = 30 * time.Second
)

// dialer opens connections that detect a dead peer.
func dialer() *net.Dialer {
	return &net.Dialer{
		KeepAliveConfig: net.KeepAliveConfig{Enable: true, Idle: silentFor, Interval: probeInterval, Count: probeCount},
		Control:         setUserTimeout,
	}
}
