// Package databases stores the databases of sql: skills, besides the agent's own.
//
// A database is a row of agent_databases: its name, the environment variable with its URL, the access, and the role of
// the queries. A workspace declares it ([Definition]). The URL is a secret: only the calling process reads it, from its
// environment. No row, message or log contains it.
//
// Access read is the default: each query is a read-only transaction that is rolled back. With access write, a skill
// with config.writes may change the database. Its effect is exactly once: package skills writes the step's key into the
// table agent_effects of that database, in the transaction of the effect.
//
// The [Client] opens a pool at the first call and keeps it. A call without the setting fails with
// skills.ClassConfiguration, which names the variable and does not count as a failure of the skill.
package databases

import (
	"errors"
	"fmt"
	"regexp"
	"time"
)

// Access of skills to a database.
const (
	AccessRead  = "read"
	AccessWrite = "write"
)

// ErrNotFound reports an undeclared database.
var ErrNotFound = errors.New("database not found")

// Definition declares a database in a workspace file.
type Definition struct {
	Name        string `yaml:"name" json:"name"`
	Description string `yaml:"description" json:"description,omitempty"`
	URLEnv      string `yaml:"url_env" json:"url_env"`         // the variable that has the URL
	Access      string `yaml:"access" json:"access,omitempty"` // read, the default, or write
	Role        string `yaml:"role" json:"role,omitempty"`     // queries run as it; empty for the URL's user
}

// Database is a declared database.
type Database struct {
	Name        string    `json:"name"`
	Description string    `json:"description"`
	URLEnv      string    `json:"url_env"`
	Access      string    `json:"access"`
	Role        string    `json:"role"`
	Source      string    `json:"source"`
	CreatedAt   time.Time `json:"created_at"`
	UpdatedAt   time.Time `json:"updated_at"`
}

var (
	namePattern = regexp.MustCompile(`^[a-zA-Z][a-zA-Z0-9_-]{0,63}$`)
	envPattern  = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]{0,127}$`)
)

// Validate returns all problems of d, each as "field path: problem".
func Validate(d Definition) error {
	var problems []error
	if !namePattern.MatchString(d.Name) {
		problems = append(problems,
			fmt.Errorf("name: %q must be a letter, then letters, digits, _ and -, 64 at most", d.Name))
	}
	switch {
	case d.URLEnv == "":
		problems = append(problems, errors.New("url_env: is missing; name the environment variable that has the URL"))
	case !envPattern.MatchString(d.URLEnv):
		// Not shown: it may be the URL itself, with a password.
		problems = append(problems, errors.New("url_env: must be the name of an environment variable, "+
			"like SHOP_DATABASE_URL; the URL itself does not belong into a file"))
	case d.URLEnv == "DATABASE_URL":
		problems = append(problems, errors.New("url_env: DATABASE_URL is the agent's own database, "+
			"which sql: skills without config.database query; name another variable"))
	}
	if d.Access != "" && d.Access != AccessRead && d.Access != AccessWrite {
		problems = append(problems, fmt.Errorf("access: %q is not one of read, write", d.Access))
	}
	if len(d.Role) > 63 {
		problems = append(problems, errors.New("role: must have at most 63 bytes"))
	}
	return errors.Join(problems...)
}
