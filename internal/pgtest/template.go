package pgtest

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/sleep"
	"github.com/lanekeeper/lanekeeper/migrations"
)

// templateLock is the advisory lock for the build of a template.
const templateLock = 0x6c6b7465

// clone makes a database with the whole schema and returns its name.
func (s *server) clone(ctx context.Context) (string, error) {
	// The log has partitions by month, created with the schema.
	template := templatePrefix + migrations.Hash()[:16] + time.Now().UTC().Format("_200601")
	name := newName()
	for {
		err := s.create(ctx, name, template)
		if !postgres.IsCode(err, "3D000") {
			return name, err
		}
		if err := s.buildTemplate(ctx, template); err != nil {
			return "", fmt.Errorf("build the template database: %w", err)
		}
	}
}

// buildTemplate migrates a database under a temporary name and renames it when it is complete. So clone never copies an
// interrupted build. Of many processes, one builds.
func (s *server) buildTemplate(ctx context.Context, template string) (err error) {
	s.building.Lock()
	defer s.building.Unlock()
	conn, err := s.admin.Acquire(ctx)
	if err != nil {
		return err
	}
	defer conn.Release()
	if _, err := conn.Exec(ctx, "select pg_advisory_lock($1)", int64(templateLock)); err != nil {
		return err
	}
	defer func() {
		_, unlockErr := conn.Exec(context.WithoutCancel(ctx), "select pg_advisory_unlock($1)", int64(templateLock))
		err = errors.Join(err, unlockErr)
	}()
	known, err := s.names(ctx, "select datname from pg_database where datname = $1", template)
	if err != nil || len(known) > 0 {
		return err
	}
	building := buildPrefix + strconv.Itoa(os.Getpid()) + "_" + rand.Text()[:10]
	if err := s.create(ctx, building, "template0"); err != nil {
		return err
	}
	if err := s.migrate(ctx, building); err != nil {
		return errors.Join(err, s.drop(context.WithoutCancel(ctx), building))
	}
	return s.seal(ctx, building, template)
}

func (s *server) migrate(ctx context.Context, database string) error {
	pool, err := postgres.Open(ctx, s.urlOf(database), postgres.Options{ApplicationName: "pgtest"})
	if err != nil {
		return err
	}
	_, err = migrations.Up(ctx, pool)
	pool.Close()
	if err != nil {
		return err
	}
	// The first connection after the migrations stores the cache of the catalogue, pg_internal.init. Copies include that
	// file.
	conn, err := pgx.Connect(ctx, s.urlOf(database))
	if err != nil {
		return err
	}
	return conn.Close(ctx)
}

// seal closes the finished database to connections, because the server cannot copy a template in use, and gives it its
// final name.
func (s *server) seal(ctx context.Context, building, template string) error {
	if _, err := s.admin.Exec(ctx, "alter database "+quote(building)+" with allow_connections false"); err != nil {
		return err
	}
	for {
		_, err := s.admin.Exec(ctx, "alter database "+quote(building)+" rename to "+quote(template))
		if !postgres.IsCode(err, "55006") || ctx.Err() != nil {
			return err
		}
		sleep.For(ctx, 20*time.Millisecond)
	}
}
