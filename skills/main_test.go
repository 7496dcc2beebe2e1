package skills_test

import (
	"encoding/json"
	"slices"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/skills"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// put declares a skill and returns its row.
func put(t *testing.T, pool *pgxpool.Pool, d skills.Definition) skills.Skill {
	t.Helper()
	if _, err := skills.Put(t.Context(), pool, d, skills.SourceWorkspace); err != nil {
		t.Fatal(err)
	}
	s, err := skills.Get(t.Context(), pool, d.Name)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func registry(t *testing.T, o skills.Options) *skills.Registry {
	t.Helper()
	r, err := skills.New(o)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// row makes a Skill of a definition without a database.
func row(t *testing.T, d skills.Definition) skills.Skill {
	t.Helper()
	parameters := d.Parameters
	if parameters == nil {
		parameters = map[string]any{"type": "object"}
	}
	tool, err := json.Marshal(map[string]any{"name": d.Name, "parameters": parameters})
	if err != nil {
		t.Fatal(err)
	}
	config, err := json.Marshal(d.Config)
	if err != nil {
		t.Fatal(err)
	}
	return skills.Skill{Name: d.Name, ToolDefinition: tool, Handler: d.Handler, Config: config, TimeoutMS: 5000}
}

func object(properties map[string]any, required ...string) map[string]any {
	schema := map[string]any{"type": "object"}
	if properties != nil {
		schema["properties"] = properties
	}
	if len(required) > 0 {
		schema["required"] = required
	}
	return schema
}

func sorted(list []string) []string {
	slices.Sort(list)
	return list
}
