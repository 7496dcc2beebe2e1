// Package examples holds the example workspaces that come with the program.
//
// The binary contains them, so `agent dev` and `agent demo` have a workspace on every machine. A workspace is data:
// package workspace reads and applies it.
package examples

import (
	"bytes"
	"embed"
	"encoding/json"
	"fmt"
	"io/fs"
	"strings"
	"text/template"
)

//go:embed caretaker onboarding orders
var files embed.FS

// Caretaker is the workspace of an agent that monitors its own PostgreSQL.
func Caretaker() (fs.FS, error) { return fs.Sub(files, "caretaker") }

// Onboarding is the workspace of agents that take a candidate through their onboarding, in one thread and in Spanish.
func Onboarding() (fs.FS, error) { return fs.Sub(files, "onboarding") }

// Orders is a shop's order desk: the folder workspace, and the SQL of the shop's own database.
func Orders() (fs.FS, error) { return fs.Sub(files, "orders") }

//go:embed starter
var starter embed.FS

// Starter has the values of a new workspace. Database and DatabaseEnv are empty for the agent's own database.
type Starter struct {
	Name        string // of the agent
	Purpose     string // one sentence
	Timezone    string
	Database    string // the name that skills use
	DatabaseEnv string // the variable with its URL
}

// Files are the files of the workspace by name.
func (s Starter) Files() (map[string][]byte, error) {
	s.Purpose = strings.Join(strings.Fields(s.Purpose), " ")
	names, err := fs.Glob(starter, "starter/*.yaml")
	if err != nil {
		return nil, fmt.Errorf("read starter workspace: %w", err)
	}
	files := map[string][]byte{}
	for _, name := range names {
		if strings.HasSuffix(name, "database.yaml") && s.Database == "" {
			continue
		}
		text, err := s.file(name)
		if err != nil {
			return nil, fmt.Errorf("fill in %s: %w", name, err)
		}
		files[strings.TrimPrefix(name, "starter/")] = text
	}
	return files, nil
}

func (s Starter) file(name string) ([]byte, error) {
	raw, err := starter.ReadFile(name)
	if err != nil {
		return nil, err
	}
	quoted := func(text string) (string, error) { // JSON's strings are YAML's, too
		b, err := json.Marshal(text)
		return string(b), err
	}
	filled, err := template.New(name).Funcs(template.FuncMap{"yaml": quoted}).Option("missingkey=error").Parse(string(raw))
	if err != nil {
		return nil, err
	}
	var out bytes.Buffer
	if err := filled.Execute(&out, s); err != nil {
		return nil, err
	}
	return out.Bytes(), nil
}
