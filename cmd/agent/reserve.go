package main

import (
	"cmp"
	"context"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// leastDivided is the smallest pool that is divided: with fewer connections everybody shares them.
const leastDivided = 6

// division is how many connections of a process that serves are kept for whom. The rest is the engine's.
type division struct{ system, admin, visitors int32 }

// divide divides so many connections.
func divide(most int32) division {
	if most < leastDivided {
		return division{}
	}
	each := min(max(most/7, 1), 8)
	return division{system: min(most/leastDivided, 2), admin: each, visitors: each}
}

func (d division) all() int32 { return d.system + d.admin + d.visitors }

// reserved are pools beside the engine's. They are nil in a process that does not serve, or has too few connections.
type reserved struct {
	system   *pgxpool.Pool // readiness, and the worker's lease
	admin    *pgxpool.Pool // the API and the Engine Room
	visitors *pgxpool.Pool // requests of visitors and of strangers
	pools    []*pgxpool.Pool
}

// reserve makes the pools.
func (s *session) reserve(ctx context.Context, d division) error {
	for _, part := range []struct {
		into **pgxpool.Pool
		most int32
	}{{&s.reserved.system, d.system}, {&s.reserved.admin, d.admin}, {&s.reserved.visitors, d.visitors}} {
		if part.most == 0 {
			continue
		}
		pool, err := postgres.Reserve(ctx, s.pool, part.most)
		if err != nil {
			return err
		}
		*part.into, s.reserved.pools = pool, append(s.reserved.pools, pool)
	}
	return nil
}

// adminPool is where the admin's requests go to the database.
func (a *app) adminPool() *pgxpool.Pool { return cmp.Or(a.reserved.admin, a.pool) }
