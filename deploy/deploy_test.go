// Package deploy_test compares the files of this folder with the program: settings, ports, probes, times. Checks that
// need other tools (Dockerfile, Kubernetes, Helm, goreleaser) are in checks, a separate module: make prove
// ONLY=packages.
package deploy_test

import (
	"bytes"
	"errors"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/config"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
)

func read(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	return string(text)
}

// deployFiles returns the files to deploy, by path.
func deployFiles(t *testing.T) map[string]string {
	t.Helper()
	all := map[string]string{"../.goreleaser.yaml": read(t, "../.goreleaser.yaml")}
	err := filepath.WalkDir(".", func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && path == "checks":
			return fs.SkipDir
		case !d.IsDir() && !strings.HasSuffix(path, ".go"):
			all[path] = read(t, path)
		}
		return nil
	})
	require.Truef(t, err == nil && len(all) >= 12, "%d files: %v", len(all), err)
	return all
}

var settingPattern = regexp.MustCompile(`\b(?:AGENT|DATABASE|OPENAI|LANEKEEPER)_[A-Z][A-Z_]*[A-Z]\b`)

// unknownSettings returns the settings in a text that the program does not read.
func unknownSettings(text string) []string {
	known := map[string]bool{}
	for _, s := range config.Settings() {
		known[s.Name] = true
		if s.Secret {
			known[s.Name+"_FILE"] = true
		}
	}
	var bad []string
	for _, name := range settingPattern.FindAllString(text, -1) {
		if !known[name] {
			bad = append(bad, name)
		}
	}
	return bad
}

func TestDeployFilesNameOnlyKnownSettings(t *testing.T) {
	found := 0
	for path, text := range deployFiles(t) {
		found += len(settingPattern.FindAllString(text, -1))
		for _, name := range unknownSettings(text) {
			t.Errorf("%s names %s, which the program does not read", path, name)
		}
	}
	assert.Truef(t, found >= 30, "only %d settings found: settingPattern is wrong", found)
	for _, wrong := range []string{"AGENT_DRAIN: 5s", "AGENT_LISTEN_FILE=x", "DATABASE_PASSWORD"} {
		assert.Equal(t, 1, len(unknownSettings(wrong)), wrong)
	}
}

// decodeYAML decodes the documents of a YAML file. The decoder refuses duplicate keys.
func decodeYAML(t *testing.T, path, text string) (all []map[string]any) {
	t.Helper()
	decoder := yaml.NewDecoder(strings.NewReader(text))
	for {
		var one map[string]any
		err := decoder.Decode(&one)
		if errors.Is(err, io.EOF) {
			return all
		}
		require.NoError(t, err, path)
		all = append(all, one)
	}
}

// lookup follows keys and indexes into a document, and fails the test if there is no T.
func lookup[T any](t *testing.T, v any, keys ...any) T {
	t.Helper()
	for _, key := range keys {
		switch key := key.(type) {
		case string:
			object, _ := v.(map[string]any)
			v = object[key]
		case int:
			list, _ := v.([]any)
			require.Truef(t, key < len(list), "%v: the list has %d items", keys, len(list))
			v = list[key]
		}
	}
	value, ok := v.(T)
	require.Truef(t, ok, "%v is %v, want a %T", keys, v, value)
	return value
}

func TestYAMLDecodes(t *testing.T) {
	for path, text := range deployFiles(t) {
		if filepath.Ext(path) != ".yaml" || strings.Contains(path, "templates") { // Helm's templates are no YAML
			continue
		}
		assert.Truef(t, len(decodeYAML(t, path, text)) > 0, "%s has no document", path)
	}
}

func duration(t *testing.T, text string) time.Duration {
	t.Helper()
	d, err := time.ParseDuration(text)
	require.NoError(t, err)
	return d
}

// defaultOf returns the default of a setting.
func defaultOf(t *testing.T, name string) string {
	t.Helper()
	list := config.Settings()
	i := slices.IndexFunc(list, func(s config.Setting) bool { return s.Name == name })
	require.Truef(t, i >= 0, "there is no setting %s", name)
	return list[i].Default
}

// After the drain delay and two times AGENT_SHUTDOWN_TIMEOUT, a process ends open responses with an error, closes the
// remaining connections, and releases its leases. Each stage takes at most stopStage.
const stopStage = 5 * time.Second

// requireGracePeriod checks that a process may finish its shutdown before it is killed.
func requireGracePeriod(t *testing.T, file string, drain, gracePeriod time.Duration) {
	t.Helper()
	needed := drain + 2*duration(t, defaultOf(t, "AGENT_SHUTDOWN_TIMEOUT")) + 3*stopStage
	assert.Truef(t, gracePeriod >= needed, "%s: the process is killed after %s, and may need %s", file, gracePeriod,
		needed)
}

// The composition keeps its data, migrates before the agent starts, and lets the agent finish its shutdown.
func TestComposeFile(t *testing.T) {
	c := decodeYAML(t, "compose.yaml", read(t, "compose.yaml"))[0]
	image := lookup[string](t, c, "services", "postgres", "image")
	version, err := strconv.Atoi(strings.TrimPrefix(image, "postgres:"))
	assert.Truef(t, err == nil && version >= 18, "the image is %q", image)
	// From PostgreSQL 18 on, the image keeps its data below this folder.
	volume := lookup[string](t, c, "services", "postgres", "volumes", 0)
	assert.Equal(t, "postgres:/var/lib/postgresql", volume)
	_, declared := lookup[map[string]any](t, c, "volumes")["postgres"]
	assert.True(t, declared, "the volume postgres is not declared")
	agent := lookup[map[string]any](t, c, "services", "agent")
	assert.Equal(t, "service_completed_successfully", lookup[string](t, agent, "depends_on", "migrate", "condition"))
	requireGracePeriod(t, "compose.yaml", duration(t, lookup[string](t, agent, "environment", "AGENT_DRAIN_DELAY")),
		duration(t, lookup[string](t, agent, "stop_grace_period")))
}

func TestKubernetesDeployment(t *testing.T) {
	all := slices.DeleteFunc(decodeYAML(t, "k8s", read(t, "k8s/lanekeeper.yaml")),
		func(d map[string]any) bool { return d["kind"] != "Deployment" })
	require.Equal(t, 1, len(all), "deployments")
	spec := lookup[map[string]any](t, all[0], "spec")
	replicas := lookup[int](t, spec, "replicas")
	assert.Truef(t, replicas >= 2, "%d replicas", replicas)
	pod := lookup[map[string]any](t, spec, "template", "spec")
	agent := lookup[map[string]any](t, pod, "containers", 0)
	env := map[string]string{}
	for _, e := range lookup[[]any](t, agent, "env") {
		entry, _ := e.(map[string]any)
		env[lookup[string](t, entry, "name")], _ = entry["value"].(string) // a secret has no value
	}
	port := lookup[int](t, agent, "ports", 0, "containerPort")
	assert.Equal(t, "0.0.0.0:"+strconv.Itoa(port), env["AGENT_LISTEN"])
	for probe, path := range map[string]string{
		"startupProbe": "/healthz", "livenessProbe": "/healthz", "readinessProbe": "/readyz",
	} {
		assert.Equal(t, path, lookup[string](t, agent, probe, "httpGet", "path"), probe)
	}
	grace := lookup[int](t, pod, "terminationGracePeriodSeconds")
	requireGracePeriod(t, "k8s", duration(t, env["AGENT_DRAIN_DELAY"]), time.Duration(grace)*time.Second)
}

// The example Secret and the operator's Secret have one name: applying the whole folder would replace the latter.
func TestKubectlAppliesNoExampleSecret(t *testing.T) {
	texts := deployFiles(t)
	for _, path := range []string{"../docs/guide/production.md", "../README.md"} {
		texts[path] = read(t, path)
	}
	found := 0
	for path, text := range texts {
		for _, command := range regexp.MustCompile(`kubectl apply -f ([\w./-]+)`).FindAllStringSubmatch(text, -1) {
			found++
			applied := strings.TrimRight(command[1], ".")
			assert.Equal(t, "deploy/k8s/lanekeeper.yaml", applied, path)
		}
	}
	assert.Truef(t, found >= 2, "%d commands", found)
}

// systemd, if installed, accepts the unit, and rates its exposure at most 2.0 of 10. The unit's stop timeout covers the
// shutdown.
func TestSystemdUnit(t *testing.T) {
	unit := read(t, "systemd/lanekeeper.service")
	stopTimeout := regexp.MustCompile(`(?m)^TimeoutStopSec=(\S+)$`).FindStringSubmatch(unit)
	for _, line := range []string{"Type=notify", "ExecStart=/usr/bin/agent serve", "KillMode=mixed", "DynamicUser=yes"} {
		assert.Truef(t, strings.Contains(unit, "\n"+line+"\n"), "the unit lacks %s", line)
	}
	require.True(t, stopTimeout != nil, "the unit has no TimeoutStopSec")
	requireGracePeriod(t, "lanekeeper.service", duration(t, defaultOf(t, "AGENT_DRAIN_DELAY")),
		duration(t, stopTimeout[1]))
	analyze, err := exec.LookPath("systemd-analyze")
	if err != nil {
		t.Log("there is no systemd-analyze here")
		return
	}
	program, err := exec.LookPath("true") // in place of the agent, which is not installed
	require.NoError(t, err)
	path := filepath.Join(t.TempDir(), "lanekeeper.service")
	testkit.WriteFile(t, path, strings.ReplaceAll(unit, "/usr/bin/agent", program))
	if out, err := exec.Command(analyze, "verify", path).CombinedOutput(); err != nil || len(bytes.TrimSpace(out)) > 0 {
		t.Errorf("systemd-analyze verify: %v\n%s", err, out)
	}
	out, err := exec.Command(analyze, "security", "--offline=true", "--threshold=20", path).CombinedOutput()
	if err != nil && !strings.Contains(string(out), "unrecognized option") { // of systemd before 250
		t.Errorf("systemd-analyze security: the exposure is above 2.0: %v\n%s", err, out)
	}
}

// Heartbeats run every 30 minutes, so the first one may come that late. No alert about waiting work fires during a
// pause.
func TestAlertsOfFreshOrPausedAgent(t *testing.T) {
	rules := map[string]map[string]any{}
	all := decodeYAML(t, "alerts.yaml", read(t, "monitoring/alerts.yaml"))
	for _, rule := range lookup[[]any](t, all[0], "groups", 0, "rules") {
		rules[lookup[string](t, rule, "alert")], _ = rule.(map[string]any)
	}
	for _, name := range []string{"AgentHeartbeatLate", "AgentQueueStuck"} {
		assert.Contains(t, lookup[string](t, rules[name], "expr"), "and max by (job) (agent_paused) == 0")
	}
	delay := duration(t, lookup[string](t, rules["AgentHeartbeatLate"], "for"))
	assert.Truef(t, delay > 30*time.Minute, "AgentHeartbeatLate fires after %s", delay)
}
