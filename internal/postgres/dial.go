package postgres

import (
	"net"
	"time"
)

const (
	// A server whose machine is gone says nothing. A connection that is silent for this long is asked whether the other
	// side is there, so many times, so far apart; and what is sent must be confirmed within goneAfter. Without that a
	// statement would wait for the better part of an hour.
	silentFor  = 15 * time.Second
	askedEvery = 5 * time.Second
	askedTimes = 3
	goneAfter  = 30 * time.Second
)

// dialer opens connections that notice when the other side is gone.
func dialer() *net.Dialer {
	return &net.Dialer{
		KeepAliveConfig: net.KeepAliveConfig{Enable: true, Idle: silentFor, Interval: askedEvery, Count: askedTimes},
		Control:         confirmWithin,
	}
}
