package workspace

import (
	"strings"

	"github.com/lanekeeper/lanekeeper/automations"
	"github.com/lanekeeper/lanekeeper/flows"
	"github.com/lanekeeper/lanekeeper/mcp"
	"github.com/lanekeeper/lanekeeper/objectives"
	"github.com/lanekeeper/lanekeeper/skills"
	"github.com/lanekeeper/lanekeeper/webhooks"
)

// kind is one sort of document.
type kind struct {
	name string
	read func(l *loader, s source)
}

// kinds lists what documents may be, in the order in which they are applied.
func kinds() []kind {
	return []kind{
		agentKind(), databaseKind(),
		reader("skill", skills.Validate, func(d skills.Definition) string { return d.Name },
			func(w *Workspace) *[]Document[skills.Definition] { return &w.Skills }),
		reader("mcp_server", mcp.Validate, func(d mcp.Definition) string { return d.Name },
			func(w *Workspace) *[]Document[mcp.Definition] { return &w.MCPServers }),
		reader("objective", objectives.Validate, func(d objectives.Definition) string { return d.Name },
			func(w *Workspace) *[]Document[objectives.Definition] { return &w.Objectives }),
		reader("automation", automations.Validate, func(d automations.Definition) string { return d.Name },
			func(w *Workspace) *[]Document[automations.Definition] { return &w.Automations }),
		reader("flow", flows.Validate, func(d flows.Definition) string { return d.Name },
			func(w *Workspace) *[]Document[flows.Definition] { return &w.Flows }),
		reader("webhook", webhooks.ValidateEndpoint, func(d webhooks.EndpointDefinition) string { return d.Name },
			func(w *Workspace) *[]Document[webhooks.EndpointDefinition] { return &w.Webhooks }),
		reader("webhook_target", webhooks.ValidateTarget, func(d webhooks.TargetDefinition) string { return d.Name },
			func(w *Workspace) *[]Document[webhooks.TargetDefinition] { return &w.Targets }),
	}
}

// reader makes the kind whose documents are definitions of type D.
func reader[D any](name string, validate func(D) error, nameOf func(D) string, list func(*Workspace) *[]Document[D]) kind {
	return kind{name: name, read: func(l *loader, s source) {
		document := Document[D]{At: position(s.file, s.node), source: s}
		wrong := s.decode(&document.Definition)
		l.problems = append(l.problems, wrong...)
		l.problems = append(l.problems, s.beside(wrong, validate(document.Definition))...)
		l.declare(name, nameOf(document.Definition), s)
		to := list(&l.workspace)
		*to = append(*to, document)
	}}
}

func kindNames() []string {
	var names []string
	for _, k := range kinds() {
		names = append(names, k.name)
	}
	return names
}

// kindList is the kinds for a message: "skill, automation or objective".
func kindList() string {
	names := kindNames()
	last := len(names) - 1
	return strings.Join(names[:last], ", ") + " or " + names[last]
}
