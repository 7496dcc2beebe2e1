package checks_test

import (
	"bytes"
	"errors"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"helm.sh/helm/v3/pkg/chart/loader"
	"helm.sh/helm/v3/pkg/chartutil"
	"helm.sh/helm/v3/pkg/engine"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	policyv1 "k8s.io/api/policy/v1"
	"k8s.io/apimachinery/pkg/util/yaml"
	strict "sigs.k8s.io/yaml"
)

// kinds are the allowed kinds, with their types.
func kinds() map[string]any {
	return map[string]any{
		"v1 ServiceAccount": &corev1.ServiceAccount{}, "v1 Service": &corev1.Service{}, "v1 Secret": &corev1.Secret{},
		"apps/v1 Deployment": &appsv1.Deployment{}, "policy/v1 PodDisruptionBudget": &policyv1.PodDisruptionBudget{},
		"networking.k8s.io/v1 Ingress": &networkingv1.Ingress{},
	}
}

// objects decodes manifests into the types of their kinds, and rejects unknown fields.
func objects(t *testing.T, name, text string) map[string]any {
	t.Helper()
	found := map[string]any{}
	reader := yaml.NewYAMLReader(newBuffered(text))
	for {
		doc, err := reader.Read()
		if errors.Is(err, io.EOF) {
			return found
		}
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if len(bytes.TrimSpace(doc)) == 0 {
			continue
		}
		var head struct{ APIVersion, Kind string }
		if err := strict.Unmarshal(doc, &head); err != nil {
			t.Fatalf("%s: %v\n%s", name, err, doc)
		}
		kind := head.APIVersion + " " + head.Kind
		into := kinds()[kind]
		if into == nil {
			t.Fatalf("%s: there is no kind %s", name, kind)
		}
		if err := strict.UnmarshalStrict(doc, into); err != nil {
			t.Errorf("%s: %s: %v\n%s", name, kind, err, doc)
		}
		found[head.Kind] = into
	}
}

// sound checks the references between objects.
func sound(t *testing.T, name string, all map[string]any) *appsv1.Deployment {
	t.Helper()
	d, is := all["Deployment"].(*appsv1.Deployment)
	if !is {
		t.Fatalf("%s: there is no Deployment", name)
	}
	labels := d.Spec.Template.Labels
	picks := map[string]map[string]string{"the Deployment": d.Spec.Selector.MatchLabels,
		"the Service": all["Service"].(*corev1.Service).Spec.Selector}
	if b, is := all["PodDisruptionBudget"].(*policyv1.PodDisruptionBudget); is {
		picks["the PodDisruptionBudget"] = b.Spec.Selector.MatchLabels
	}
	for who, selector := range picks {
		for key, value := range selector {
			if labels[key] != value {
				t.Errorf("%s: %s picks %s=%s, and the pods have %q", name, who, key, value, labels[key])
			}
		}
		if len(selector) == 0 {
			t.Errorf("%s: %s picks nothing", name, who)
		}
	}
	pod := d.Spec.Template.Spec
	agent := pod.Containers[0]
	if port := all["Service"].(*corev1.Service).Spec.Ports[0].TargetPort.StrVal; port != agent.Ports[0].Name {
		t.Errorf("%s: the Service leads to the port %q, and the container has %q", name, port, agent.Ports[0].Name)
	}
	if pod.SecurityContext == nil || pod.SecurityContext.RunAsNonRoot == nil || !*pod.SecurityContext.RunAsNonRoot ||
		*pod.SecurityContext.RunAsUser != 65532 {
		t.Errorf("%s: the pod may run as root", name)
	}
	for _, c := range slices.Concat(pod.InitContainers, pod.Containers) {
		s := c.SecurityContext
		if s == nil || !*s.ReadOnlyRootFilesystem || *s.AllowPrivilegeEscalation ||
			!slices.Contains(s.Capabilities.Drop, "ALL") {
			t.Errorf("%s: the container %s is not locked down", name, c.Name)
		}
	}
	return d
}

func TestTheManifestsAreWhatKubernetesReads(t *testing.T) {
	paths, err := filepath.Glob("../k8s/*.yaml")
	if err != nil || len(paths) < 2 {
		t.Fatalf("%q: %v", paths, err)
	}
	all := map[string]any{}
	for _, path := range paths {
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		maps.Copy(all, objects(t, path, string(text)))
	}
	sound(t, "k8s", all)
	if all["Secret"].(*corev1.Secret).Name != "lanekeeper" {
		t.Error("the pods read another Secret")
	}
}

// rendered returns the chart with values, rendered by Helm's engine.
func rendered(t *testing.T, values map[string]any) (string, error) {
	t.Helper()
	chart, err := loader.LoadDir("../helm/lanekeeper")
	if err != nil {
		t.Fatal(err)
	}
	if err := chart.Validate(); err != nil {
		t.Fatal(err)
	}
	all, err := chartutil.ToRenderValues(chart, values,
		chartutil.ReleaseOptions{Name: "try", Namespace: "agents", IsInstall: true}, chartutil.DefaultCapabilities)
	if err != nil {
		return "", err
	}
	made, err := engine.Render(chart, all)
	if err != nil {
		return "", err
	}
	var text strings.Builder
	for _, path := range slices.Sorted(maps.Keys(made)) {
		if strings.HasSuffix(path, ".yaml") {
			text.WriteString("\n---\n" + made[path])
		}
	}
	return text.String(), nil
}

func TestTheChart(t *testing.T) {
	secrets := map[string]any{"DATABASE_URL": "postgres://a@b/c", "AGENT_ADMIN_TOKEN": "t"}
	for name, c := range map[string]struct {
		values map[string]any
		has    []string // kinds
		hasNot []string
	}{
		"with a Secret of one's own": {
			map[string]any{"existingSecret": "mine"}, []string{"Deployment", "Service", "ServiceAccount", "PodDisruptionBudget"},
			[]string{"Secret", "Ingress"},
		},
		"with secrets": {map[string]any{"secrets": secrets}, []string{"Secret"}, nil},
		"with the names of a workspace and of Go": {
			map[string]any{
				"secrets": map[string]any{
					"DATABASE_URL": "postgres://a@b/c", "AGENT_ADMIN_TOKEN": "t", "SHOP_DATABASE_URL": "u", "TELEGRAM_TOKEN": "v",
				},
				"settings": map[string]any{"GOMEMLIMIT": "400MiB", "GOGC": 100},
			}, []string{"Secret"}, nil,
		},
		"with everything": {
			map[string]any{
				"secrets": secrets, "replicas": 5, "drainSeconds": 3, "shutdownSeconds": 7,
				"settings":  map[string]any{"AGENT_WORKERS": 1e6, "AGENT_LANES": "on"},
				"ingress":   map[string]any{"enabled": true, "host": "agent.example.com", "tlsSecret": "tls", "className": "nginx"},
				"migrate":   false,
				"podLabels": map[string]any{"team": "a"}, "podAnnotations": map[string]any{"b": "c"},
				"nodeSelector":     map[string]any{"d": "e"},
				"tolerations":      []any{map[string]any{"key": "f", "operator": "Exists"}},
				"imagePullSecrets": []any{map[string]any{"name": "g"}},
				"affinity":         map[string]any{"nodeAffinity": map[string]any{}},
			}, []string{"Secret", "Ingress"}, nil,
		},
		"with one replica": {map[string]any{"existingSecret": "mine", "replicas": 1}, []string{"Deployment"},
			[]string{"PodDisruptionBudget"}},
	} {
		t.Run(name, func(t *testing.T) {
			text, err := rendered(t, c.values)
			if err != nil {
				t.Fatal(err)
			}
			all := objects(t, name, text)
			d := sound(t, name, all)
			for _, kind := range c.has {
				if all[kind] == nil {
					t.Errorf("there is no %s", kind)
				}
			}
			for _, kind := range c.hasNot {
				if all[kind] != nil {
					t.Errorf("there is a %s", kind)
				}
			}
			env := map[string]string{}
			for _, e := range d.Spec.Template.Spec.Containers[0].Env {
				env[e.Name] = e.Value
			}
			if name == "with everything" && (env["AGENT_WORKERS"] != "1000000" || env["AGENT_LANES"] != "on" ||
				env["AGENT_DRAIN_DELAY"] != "3s" ||
				*d.Spec.Template.Spec.TerminationGracePeriodSeconds != 3+2*7+20 || *d.Spec.Replicas != 5) {
				t.Errorf("the values are not followed: %v", env)
			}
		})
	}
}

// The chart's pod equals the one of the manifests, except for names.
func TestTheChartMakesThePodOfTheManifests(t *testing.T) {
	plain, err := os.ReadFile("../k8s/lanekeeper.yaml")
	if err != nil {
		t.Fatal(err)
	}
	text, err := rendered(t, map[string]any{"existingSecret": "lanekeeper"})
	if err != nil {
		t.Fatal(err)
	}
	want, got := sound(t, "k8s", objects(t, "k8s", string(plain))).Spec, sound(t, "helm", objects(t, "helm", text)).Spec
	for _, d := range []*appsv1.DeploymentSpec{&want, &got} {
		d.Selector, d.Template.ObjectMeta, d.Template.Spec.ServiceAccountName = nil, want.Template.ObjectMeta, ""
		d.Template.Spec.TopologySpreadConstraints[0].LabelSelector = nil
		for _, list := range [][]corev1.Container{d.Template.Spec.InitContainers, d.Template.Spec.Containers} {
			for i := range list {
				list[i].ImagePullPolicy = ""
				list[i].Env = slices.DeleteFunc(list[i].Env,
					func(e corev1.EnvVar) bool { return e.Name == "AGENT_SHUTDOWN_TIMEOUT" && e.Value == "25s" })
			}
		}
	}
	wanted, err := strict.Marshal(want)
	if err != nil {
		t.Fatal(err)
	}
	made, err := strict.Marshal(got)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(wanted, made) {
		t.Errorf("the manifests have\n%s\nthe chart makes\n%s", wanted, made)
	}
}

func TestTheChartRefusesWhatCannotBe(t *testing.T) {
	for name, c := range map[string]struct {
		values map[string]any
		says   string
	}{
		"no secret":        {nil, "set existingSecret"},
		"a misspelt value": {map[string]any{"existingSecret": "s", "replica": 3}, "replica"},
		"a misspelt setting": {map[string]any{"existingSecret": "s", "settings": map[string]any{"AGNET_MODEL": "m"}},
			"AGNET_MODEL"},
		"a setting that has a value of its own": {map[string]any{"existingSecret": "s",
			"settings": map[string]any{"AGENT_SHUTDOWN_TIMEOUT": "2m"}}, "shutdownSeconds"},
		"no replica": {map[string]any{"existingSecret": "s", "replicas": 0}, "replicas"},
		"an Ingress for none": {map[string]any{"existingSecret": "s", "ingress": map[string]any{"enabled": true}},
			"ingress.host"},
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := rendered(t, c.values); err == nil || !strings.Contains(err.Error(), c.says) {
				t.Errorf("got %v, want an error that says %q", err, c.says)
			}
		})
	}
}
