package migrations_test

import (
	"flag"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/schemadoc"
	"github.com/lanekeeper/lanekeeper/migrations"
)

var update = flag.Bool("update", false, "write docs/schema.md and docs/schema.svg")

func TestTheSchemaPageIsThatOfTheDatabase(t *testing.T) {
	nouns, err := schemadoc.Read(t.Context(), pgtest.DB(t), migrations.Files())
	if err != nil {
		t.Fatal(err)
	}
	if missing := schemadoc.Missing(nouns); len(missing) > 0 {
		t.Errorf("without a comment in migrations/schema: %s", strings.Join(missing, ", "))
	}
	for path, want := range map[string]string{
		"../docs/schema.md":  schemadoc.Page(nouns),
		"../docs/schema.svg": schemadoc.Picture(nouns),
	} {
		if *update {
			if err := os.WriteFile(path, []byte(want), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		got, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(strings.Split(string(got), "\n"), strings.Split(want, "\n")); diff != "" {
			t.Errorf("%s differs; run go test ./migrations -run TestTheSchemaPage -update\n%s", path, diff)
		}
	}
}
