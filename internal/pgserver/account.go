package pgserver

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/user"
	"path/filepath"
	"strconv"
	"syscall"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// Account is the unprivileged user of a server that root starts. A nil account means the current user.
type Account struct {
	name string
	uid  int
	gid  int
}

// ServerAccount returns postgres or nobody if root runs this process, else nil. The user needs an entry in the user
// database: PostgreSQL looks up its own user.
func ServerAccount() (*Account, error) {
	if os.Geteuid() != 0 {
		return nil, nil
	}
	for _, name := range []string{"postgres", "nobody"} {
		if u, err := user.Lookup(name); err == nil {
			return newAccount(u)
		}
	}
	return nil, errors.New("PostgreSQL does not run as root, and there is neither a user postgres nor nobody: run " +
		"useradd --system postgres")
}

func newAccount(u *user.User) (*Account, error) {
	uid, err := strconv.Atoi(u.Uid)
	if err != nil {
		return nil, fmt.Errorf("user %s: %w", u.Username, err)
	}
	gid, err := strconv.Atoi(u.Gid)
	if err != nil {
		return nil, fmt.Errorf("user %s: %w", u.Username, err)
	}
	return &Account{name: u.Username, uid: uid, gid: gid}, nil
}

// Attributes returns the attributes of a process of the account, in its own process group.
func (a *Account) Attributes() *syscall.SysProcAttr {
	attributes := &syscall.SysProcAttr{Setpgid: true}
	if a != nil {
		attributes.Credential = &syscall.Credential{Uid: uint32(a.uid), Gid: uint32(a.gid)}
	}
	return attributes
}

// chown makes the account the owner of path.
func (a *Account) chown(path string) error {
	if a == nil {
		return nil
	}
	return os.Lchown(path, a.uid, a.gid)
}

// OwnTree makes the account the owner of a folder and everything below it.
func (a *Account) OwnTree(root string) error {
	if a == nil {
		return nil
	}
	return filepath.WalkDir(root, func(path string, _ fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		return a.chown(path)
	})
}

// blockedAt returns the first folder on the way to path that the account may not enter, or "". Missing folders do not
// block.
func (a *Account) blockedAt(path string) string {
	if a == nil {
		return ""
	}
	var blocked string
	for dir := resolved(path); ; dir = filepath.Dir(dir) {
		if info, err := os.Stat(dir); err == nil && !a.passes(info) {
			blocked = dir
		}
		if dir == filepath.Dir(dir) {
			return blocked
		}
	}
}

// resolved returns path with the symbolic links of its existing part resolved.
func resolved(path string) string {
	if real, err := filepath.EvalSymlinks(path); err == nil {
		return real
	}
	if parent := filepath.Dir(path); parent != path {
		return filepath.Join(resolved(parent), filepath.Base(path))
	}
	return path
}

func (a *Account) passes(info os.FileInfo) bool {
	stat, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return true
	}
	mode := info.Mode().Perm()
	switch {
	case int(stat.Uid) == a.uid:
		return mode&0o100 != 0
	case int(stat.Gid) == a.gid:
		return mode&0o010 != 0
	}
	return mode&0o001 != 0
}

// ownerOf returns the uid of the owner of path.
func ownerOf(path string) (int, error) {
	info, err := os.Lstat(path)
	if err != nil {
		return 0, err
	}
	stat, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return 0, fmt.Errorf("stat %s: no owner", path)
	}
	return int(stat.Uid), nil
}

// assignOwner creates config.Owner. If the database has another owner, config.Owner becomes the owner of the database
// and of all objects in it.
func (s *Server) assignOwner(ctx context.Context, config Config) error {
	if config.Owner == "" {
		return nil
	}
	conn, err := pgx.Connect(ctx, connString(s.layout, superuser, config.Database))
	if err != nil {
		return fmt.Errorf("give the database to %s: %w", config.Owner, err)
	}
	err = pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error {
		var owned bool
		err := tx.QueryRow(ctx, `
			select pg_get_userbyid(datdba) = set_config('lanekeeper.owner', @owner, true),
			       set_config('lanekeeper.role', @role, true)
			  from pg_database, pg_advisory_xact_lock(hashtext('lanekeeper owner'))
			 where datname = current_database()`,
			postgres.Strict{"owner": config.Owner, "role": config.ActsAs}).Scan(&owned, nil)
		if err == nil && !owned {
			_, err = tx.Exec(ctx, changeOwner)
		}
		if err == nil && config.ActsAs != "" {
			_, err = tx.Exec(ctx, grantRole)
		}
		return err
	})
	if err = errors.Join(err, conn.Close(ctx)); err != nil {
		return fmt.Errorf("give the database to %s: %w", config.Owner, err)
	}
	return nil
}

// grantRole makes the owner a member of a role without login, which it creates if necessary.
const grantRole = `
do $$
declare
  role   text := current_setting('lanekeeper.role');
  member text := current_setting('lanekeeper.owner');
begin
  if not exists (select from pg_roles where rolname = role) then
    execute format('create role %I nologin', role);
  end if;
  if not pg_has_role(member, role, 'member') then
    execute format('grant %I to %I', role, member);
  end if;
end $$`

// changeOwner gives the database and all objects in it to a role. Indexes, sequences of columns and row types follow
// their tables.
const changeOwner = `
do $$
declare
  new_owner text := current_setting('lanekeeper.owner');
  change    text;
begin
  if not exists (select from pg_roles where rolname = new_owner) then
    execute format('create role %I login', new_owner);
  end if;
  for change in
    select 'database ' || quote_ident(current_database())
    union all
    select format('schema %I', nspname) from pg_namespace
     where nspname !~ '^pg_' and nspname <> 'information_schema'
    union all
    select format('table %s', c.oid::regclass) from pg_class c
      join pg_namespace n on n.oid = c.relnamespace
     where n.nspname !~ '^pg_' and n.nspname <> 'information_schema'
       and c.relkind in ('r', 'p', 'v', 'm', 'S', 'f')
       and not exists (
             select from pg_depend d
              where d.classid = 'pg_class'::regclass and d.objid = c.oid
                and d.deptype in ('a', 'i', 'e')
                and (c.relkind = 'S' or d.deptype = 'e'))
    union all
    select format('routine %s', p.oid::regprocedure) from pg_proc p
      join pg_namespace n on n.oid = p.pronamespace
     where n.nspname !~ '^pg_' and n.nspname <> 'information_schema'
       and not exists (
             select from pg_depend d
              where d.classid = 'pg_proc'::regclass and d.objid = p.oid and d.deptype = 'e')
    union all
    select format('type %s', t.oid::regtype) from pg_type t
      join pg_namespace n on n.oid = t.typnamespace
     where n.nspname !~ '^pg_' and n.nspname <> 'information_schema'
       and t.typtype in ('e', 'd', 'r')
       and not exists (
             select from pg_depend d
              where d.classid = 'pg_type'::regclass and d.objid = t.oid and d.deptype = 'e')
  loop
    execute format('alter %s owner to %I', change, new_owner);
  end loop;
end
$$`
